"""The calls of `RemoteOmni` that concern a stage's weights and ranks, its health, and audits."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from omni_notebook.engine import arguments
from omni_notebook.engine.remote.auditing import audited
from omni_notebook.engine.remote.bounds import bound
from omni_notebook.engine.remote.connection import Connection
from omni_notebook.engine.remote.servers import OMNI
from omni_notebook.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


class UpkeepCalls(Connection):
    """Loading weights, restarting, looking whether all is well, auditing; folders are those of the server's machine."""

    async def load_weights(
        self,
        stage_id: int,
        source: str | os.PathLike[str] | Mapping[str, Any] | Iterable[tuple[str, Any]],
        version: str | None = None,
        timeout: float | None = None,
    ) -> None:
        """Load a checkpoint folder on the server's machine into a stage; as `AsyncOmni.load_weights`.

        Raises:
            UnsupportedError: tensors instead of a path; nothing was sent.
        """

        async def run() -> None:
            self._server.has("load_weights")
            if not isinstance(source, str | os.PathLike):
                msg = (
                    "load_weights over HTTP takes a folder on the server's machine, not tensors: write a checkpoint "
                    "there and name it. Nothing was sent, nothing changed"
                )
                raise UnsupportedError(msg)
            checked = arguments.check_version(version)
            body = {"stage_id": stage_id, "path": self._place(source), "version": checked, "timeout": bound(timeout)}
            await self._order("load of weights", "/weights", body)

        await self._run(run)

    async def restart(self, stage_id: int, timeout: float | None = None) -> None:
        """End a stage's ranks and start new ones from its last checkpoint; as `AsyncOmni.restart`."""

        async def run() -> None:
            self._server.has("restart")
            await self._order("restart", "/restart", {"stage_id": stage_id, "timeout": bound(timeout)})

        await self._run(run)

    # -------------------------------------------------------------------------------- audits

    async def audit_there(
        self, body: dict[str, Any], told: Callable[[str, float | None], None] | None = None
    ) -> dict[str, Any]:
        """Have the server audit its engine, beside the ranks; what it answers.

        Leaving ends the audit there, which wakes the stages first.

        Args:
            body: of `POST /v1/omni/audit`.
            told: called with how far it is, a label and a share of the whole, as often as that changes.
        """

        async def run() -> dict[str, Any]:
            self._server.has("audit")
            return await audited(self._line, f"{OMNI}/audit", body, told or _nobody)

        return await self._run(run)

    async def record_audit(self, verdict: str, report: Any) -> None:  # noqa: ARG002  (the words of `AsyncOmni`)
        """An audit made elsewhere can not be put into the server's ledger; those of `audit_there` are in it.

        Raises:
            UnsupportedError: always.
        """
        msg = "the server keeps its own history, and takes no audits that were made elsewhere; nothing was recorded"
        raise UnsupportedError(msg)

    async def check_health(self) -> None:
        """Return if every stage can work; as `AsyncOmni.check_health`.

        Raises:
            ServerLostError: the server does not answer.
        """

        async def run() -> None:
            await self._line.get("/health")

        await self._run(run)


def _nobody(_label: str, _share: float | None) -> None:
    return None
