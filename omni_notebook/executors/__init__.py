"""Executors carry calls to ranks: `uni` in this process, `mp` in child processes; every caller sees one contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_notebook.errors import UnsupportedError

if TYPE_CHECKING:
    from omni_notebook.config import StageConfig
    from omni_notebook.executors.base import ExecutorFactory


def make_executor(config: StageConfig) -> ExecutorFactory:
    """The executor that a stage is configured for.

    Raises:
        UnsupportedError: `executor="ray"`.
    """
    if config.runtime_name == "vllm":
        from omni_notebook.executors.hosted import HostedExecutor  # noqa: PLC0415  (loads only what is used)

        return HostedExecutor
    if config.executor_name == "uni":
        from omni_notebook.executors.uni import UniExecutor  # noqa: PLC0415  (loads only what is used)

        return UniExecutor
    if config.executor_name == "mp":
        from omni_notebook.executors.mp.executor import MpExecutor  # noqa: PLC0415

        return MpExecutor
    msg = f"executor={config.executor_name!r} is not in this release; use 'uni' or 'mp'"
    raise UnsupportedError(msg)
