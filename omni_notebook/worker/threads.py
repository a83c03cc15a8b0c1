"""How a rank's threads wait for one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def waiting_threads_sleep(environment: Mapping[str, str]) -> dict[str, str]:
    """What to set so that threads which wait sleep, unless the user has said how they wait.

    Threads that spin take the processors from the other processes, which know nothing of them: on two cores the demo
    was several times slower, and vLLM's tokens came in one lump at the end.
    """
    return {} if any(name in environment for name in _WAIT_VARIABLES) else {"OMP_WAIT_POLICY": "PASSIVE"}
