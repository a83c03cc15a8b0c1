"""`RemoteOmni`: an engine on a server, with the API of `AsyncOmni`."""

from __future__ import annotations

import concurrent.futures
import operator
import os
import uuid
from typing import TYPE_CHECKING, Any

from omni_notebook.engine import arguments
from omni_notebook.engine.remote.connection import Connection
from omni_notebook.engine.remote.lora_calls import RemoteLoRACalls
from omni_notebook.engine.remote.pumping import pumped
from omni_notebook.errors import ArgumentError, UnsupportedError
from omni_notebook.protocol import LoRARequest, MemoryState, sampling_params_from

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    from omni_notebook.protocol import EngineStatus, OmniACK, OmniRequestOutput, OmniSamplingParams, StageStatus


class RemoteOmni(Connection, RemoteLoRACalls):
    """An engine that a server runs, on this machine or another.

    Every coroutine may be awaited from any event loop and thread; `status`, `logs`, `subscribe` and `shutdown` are
    plain calls. Errors are those of `AsyncOmni`, with its attributes and messages. An order is sent once: where the
    connection is lost, a `ServerLostError` says that it may go on there. A call that is cancelled is waited for no
    more; a request ends with it, an order goes on there.

    Attributes:
        url: where the server is.
        host: the name of its machine, None if that is this one.

    Args:
        url: of the server, such as http://host:8000.
        api_key: what it was started with, if it asks for one.
        timeout: seconds for connecting and for what waits for nobody; orders have bounds of their own.

    Raises:
        ServerLostError: nobody answers there.
        ConfigError: another key is wanted, or it is no server of this kind.
        ArgumentError: the URL can be none.
    """

    # ------------------------------------------------------------------------- sleep and wake

    async def sleep(
        self,
        stage_ids: Sequence[int] | int | None = None,
        level: int = 1,
        mode: str | None = None,
        timeout: float | None = None,
        *,
        discard: bool = True,
        raise_on_error: bool = True,
    ) -> list[OmniACK]:
        """Put stages to sleep; as `AsyncOmni.sleep`.

        Raises:
            ServerLostError: the server went away; the order may go on there.
            OmniError: what `AsyncOmni.sleep` raises.
        """

        async def run() -> list[OmniACK]:
            body = {
                "stage_ids": ids_of(stage_ids),
                "level": arguments.check_level(level),
                "mode": None if mode is None else str(arguments.check_mode(mode)),
                "timeout": bound(timeout),
                "discard": discard,
            }
            return await self._server.sleep(self._line, body, strict=raise_on_error)

        return await self._run(run)

    async def wake_up(
        self,
        stage_ids: Sequence[int] | int | None = None,
        tags: Sequence[str] | str | None = None,
        reload: bool = True,
        timeout: float | None = None,
        *,
        raise_on_error: bool = True,
    ) -> list[OmniACK]:
        """Wake stages, or some of their tags; as `AsyncOmni.wake_up`.

        Raises:
            ServerLostError: the server went away; the order may go on there.
            OmniError: what `AsyncOmni.wake_up` raises.
        """

        async def run() -> list[OmniACK]:
            given = None if tags is None else arguments.listed("tags", tags)
            body = {"stage_ids": ids_of(stage_ids), "tags": given, "reload": reload, "timeout": bound(timeout)}
            return await self._server.wake(self._line, body, strict=raise_on_error)

        return await self._run(run)

    async def is_sleeping(self, stage_ids: Sequence[int] | int | None = None) -> bool:
        """Whether any of the stages (None = all) is not AWAKE.

        Raises:
            ArgumentError: unknown stage.
        """

        async def run() -> bool:
            status = await self._server.status(self._line)
            ids = ids_of(stage_ids)
            return any(stage.state != MemoryState.AWAKE for stage in _picked(status, ids))

        return await self._run(run)

    # ---------------------------------------------------------------------- pause and resume

    async def pause_generation(
        self,
        mode: str = "abort",
        stage_ids: Sequence[int] | int | None = None,
        wait_for_inflight_requests: bool = False,
        clear_cache: bool = True,
        timeout: float | None = None,
    ) -> None:
        """Close admission, and bring schedulers to rest; as `AsyncOmni.pause_generation`."""

        async def run() -> None:
            self._server.has("pause_generation")
            body = {
                "mode": str(arguments.check_mode(mode)),
                "stage_ids": ids_of(stage_ids),
                "wait_for_inflight_requests": wait_for_inflight_requests,
                "clear_cache": clear_cache,
                "timeout": bound(timeout),
            }
            await self._order("pause", "/pause", body)

        await self._run(run)

    async def resume_generation(self, stage_ids: Sequence[int] | int | None = None) -> None:
        """Open paused schedulers; as `AsyncOmni.resume_generation`."""

        async def run() -> None:
            self._server.has("resume_generation")
            await self._order("resume", "/resume", {"stage_ids": ids_of(stage_ids)})

        await self._run(run)

    async def is_paused(self) -> bool:
        """Whether admission is closed by a pause."""

        async def run() -> bool:
            self._server.has("is_paused")
            return (await self._server.status(self._line)).paused

        return await self._run(run)

    # ------------------------------------------------------------------------------- requests

    async def generate(  # noqa: PLR0913  (the words of `AsyncOmni.generate`)
        self,
        prompt: str | dict[str, Any],
        request_id: str | None = None,
        sampling_params: OmniSamplingParams | dict[str, Any] | None = None,
        *,
        output_modalities: Sequence[str] | str | None = None,
        admission_timeout: float = 60.0,
        timeout: float | None = None,
        lora_request: LoRARequest | str | int | None = None,
    ) -> AsyncIterator[OmniRequestOutput]:
        """Outputs as they come; as `AsyncOmni.generate`. Images are opened from the PNG files that came.

        Raises:
            ServerLostError: the server went away; the request ends with its client.
            OmniError: what `AsyncOmni.generate` raises.
        """
        named = lora_request.lora_int_id if isinstance(lora_request, LoRARequest) else lora_request
        body = {
            "prompt": prompt,
            "request_id": uuid.uuid4().hex[:12] if request_id is None else request_id,
            "sampling_params": _given(sampling_params),
            "output_modalities": None if output_modalities is None else arguments.listed("", output_modalities),
            "admission_timeout": arguments.check_timeout(admission_timeout, "admission_timeout"),
            "timeout": arguments.check_timeout(timeout),
            "lora_request": named,
        }
        self._check_open()
        try:
            async for output in pumped(self._loop, lambda: self._asked(body)):
                yield output
        except concurrent.futures.CancelledError:
            raise self._closed() from None

    async def _asked(self, body: dict[str, Any]) -> AsyncIterator[OmniRequestOutput]:
        await self._follower.listening()
        async for output in self._server.generate(self._line, body):
            yield output

    async def abort(self, request_id: str) -> bool:
        """End a request with a terminal output (state "aborted"); whether it was in progress."""

        async def run() -> bool:
            self._server.has("abort")
            answer = await self._order("abort", "/abort", {"request_id": request_id})
            return bool(answer.body.get("found"))

        return await self._run(run)

    # -------------------------------------------------------------------------------- weights

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
            body = {"stage_id": stage_id, "path": os.fspath(source), "version": checked, "timeout": bound(timeout)}
            await self._order("load of weights", "/weights", body)

        await self._run(run)

    async def restart(self, stage_id: int, timeout: float | None = None) -> None:
        """End a stage's ranks and start new ones from its last checkpoint; as `AsyncOmni.restart`."""

        async def run() -> None:
            self._server.has("restart")
            await self._order("restart", "/restart", {"stage_id": stage_id, "timeout": bound(timeout)})

        await self._run(run)

    # -------------------------------------------------------------------------------- audits

    async def audit_there(self, body: dict[str, Any]) -> dict[str, Any]:
        """Have the server audit its engine, beside the ranks; what it answers.

        Leaving ends the audit there, which wakes the stages first.

        Args:
            body: of `POST /v1/omni/audit`.
        """

        async def run() -> dict[str, Any]:
            self._server.has("audit")
            return (await self._order("audit", "/audit", body)).body

        return await self._run(run)

    async def record_audit(self, verdict: str, report: Any) -> None:  # noqa: ARG002  (the words of `AsyncOmni`)
        """An audit made elsewhere can not be put into the server's ledger; those of `audit_there` are in it.

        Raises:
            UnsupportedError: always.
        """
        msg = "the server keeps its own history, and takes no audits that were made elsewhere; nothing was recorded"
        raise UnsupportedError(msg)

    # ------------------------------------------------------------------------- plain calls

    async def check_health(self) -> None:
        """Return if every stage can work; as `AsyncOmni.check_health`.

        Raises:
            ServerLostError: the server does not answer.
        """

        async def run() -> None:
            await self._line.get("/health")

        await self._run(run)


def ids_of(stage_ids: Any) -> list[Any] | None:
    """What goes over the wire for one stage, several, or all; whether they exist the server says."""
    if stage_ids is None:
        return None
    ids = arguments.listed("stage_ids", stage_ids)
    return [operator.index(one) if hasattr(one, "__index__") and not isinstance(one, bool) else one for one in ids]


def _picked(status: EngineStatus, ids: list[Any] | None) -> list[StageStatus]:
    """The named stages; None = all.

    Raises:
        ArgumentError: an unknown id, or none at all.
    """
    known = {stage.stage_id: stage.name for stage in status.stages}
    wrong = [] if ids is None else [one for one in ids if one not in known or isinstance(one, bool)]
    if wrong or ids == []:
        have = ", ".join(f"{number} ({name})" for number, name in known.items())
        what = f"there is no stage {wrong[0]!r}" if wrong else "stage_ids is empty"
        msg = f"{what}; this engine has {have}. Nothing changed"
        raise ArgumentError(msg)
    return [stage for stage in status.stages if ids is None or stage.stage_id in ids]


def bound(timeout: Any) -> float | None:
    """Seconds of an order.

    Raises:
        ArgumentError: not a number of seconds ≥ 0.
    """
    return arguments.check_timeout(timeout)


def _given(params: Any) -> dict[str, Any] | None:
    """The sampling parameters that were given, if they fit.

    Raises:
        ArgumentError: they do not.
    """
    checked = sampling_params_from(params)
    if params is None:
        return None
    named = params if isinstance(params, dict) else {name: getattr(params, name) for name in params.__struct_fields__}
    return {str(name): getattr(checked, str(name)) for name in named}
