"""`RemoteOmni`: an engine on a server, with the API of `AsyncOmni`."""

from __future__ import annotations

import concurrent.futures
import operator
import uuid
from typing import TYPE_CHECKING, Any

from omni_notebook.engine import arguments
from omni_notebook.engine.remote.bounds import bound, bound_at_gates
from omni_notebook.engine.remote.lora_calls import LoRACalls
from omni_notebook.engine.remote.pumping import pumped
from omni_notebook.engine.remote.upkeep_calls import UpkeepCalls
from omni_notebook.errors import ArgumentError
from omni_notebook.protocol import MemoryState, is_unicode, said_of, sampling_params_from

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from omni_notebook.protocol import (
        EngineStatus,
        LoRARequest,
        OmniACK,
        OmniRequestOutput,
        OmniSamplingParams,
        StageStatus,
    )


class RemoteOmni(UpkeepCalls, LoRACalls):
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
                "stage_ids": await self._ids(stage_ids),
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
            body = {
                "stage_ids": await self._ids(stage_ids),
                "tags": await self._tags(tags),
                "reload": reload,
                "timeout": bound(timeout),
            }
            return await self._server.wake(self._line, body, strict=raise_on_error)

        return await self._run(run)

    async def is_sleeping(self, stage_ids: Sequence[int] | int | None = None) -> bool:
        """Whether any of the stages (None = all) is not AWAKE.

        Raises:
            ArgumentError: unknown stage.
        """

        async def run() -> bool:
            status = await self._server.status(self._line)
            ids = None if stage_ids is None else arguments.listed("stage_ids", stage_ids)
            return any(stage.state != MemoryState.AWAKE for stage in _picked(status, ids))

        return await self._run(run)

    async def _ids(self, stage_ids: Any) -> list[int] | None:
        """What goes over the wire for one stage, several, or all; whether a number is a stage's the server says.

        Raises:
            ArgumentError: none is named, or something that is no number.
        """
        if stage_ids is None:
            return None
        ids = [_plain(one) for one in arguments.listed("stage_ids", stage_ids)]
        if not ids:
            msg = "stage_ids is empty; name stages, or give None for all of them. Nothing changed"
            raise ArgumentError(msg)
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
            _picked(await self._server.status(self._line), ids)
        return ids

    async def _tags(self, tags: Sequence[str] | str | None) -> list[str] | None:
        """The named tags, or None.

        Raises:
            ArgumentError: none is named.
        """
        given = None if tags is None else arguments.listed("tags", tags)
        if given == []:
            status = await self._server.status(self._line)
            known = sorted({tag for stage in status.stages for rank in stage.ranks for tag in rank.tags})
            msg = f"tags is empty; these stages have {', '.join(known)}. Nothing changed"
            raise ArgumentError(msg)
        return given

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
                "stage_ids": await self._ids(stage_ids),
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
            await self._order("resume", "/resume", {"stage_ids": await self._ids(stage_ids)})

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

        A server bounds a request that names no `timeout` too: 600 s, and it waits at most 3600 s at a gate.

        Raises:
            ServerLostError: the server went away; the request ends with its client.
            OmniError: what `AsyncOmni.generate` raises.
        """
        body = {
            "prompt": _prompt(prompt),
            "request_id": uuid.uuid4().hex[:12] if request_id is None else _request_id(request_id),
            "sampling_params": _given(sampling_params),
            "output_modalities": None if output_modalities is None else arguments.listed("", output_modalities),
            "admission_timeout": bound_at_gates(admission_timeout),
            "timeout": bound(timeout),
        }
        self._check_open()
        try:
            async for output in pumped(self._loop, lambda: self._asked(body, lora_request)):
                yield output
        except concurrent.futures.CancelledError:
            raise self._closed() from None

    async def _asked(self, body: dict[str, Any], adapter: Any) -> AsyncIterator[OmniRequestOutput]:
        await self._follower.listening()
        named = await self._named(adapter)
        async for output in self._server.generate(self._line, {**body, "lora_request": named}):
            yield output

    async def abort(self, request_id: str) -> bool:
        """End a request with a terminal output (state "aborted"); whether it was in progress."""

        async def run() -> bool:
            self._server.has("abort")
            answer = await self._order("abort", "/abort", {"request_id": request_id})
            return bool(answer.body.get("found"))

        return await self._run(run)


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


def _plain(stage_id: Any) -> Any:
    """A number as Python's own, whatever library it is of."""
    is_number = hasattr(stage_id, "__index__") and not isinstance(stage_id, bool)
    return operator.index(stage_id) if is_number else stage_id


def _prompt(prompt: Any) -> Any:
    """A prompt that can be sent; whether the model takes it the server says."""
    given = prompt if isinstance(prompt, dict) else {"prompt": prompt}
    if given.keys() == {"prompt_token_ids"}:
        ids = given["prompt_token_ids"]
        fits = isinstance(ids, list | tuple) and all(isinstance(one, int) for one in ids)
    else:
        fits = given.keys() <= {"prompt", "negative_prompt"} and isinstance(given.get("prompt"), str)
        fits = fits and isinstance(given.get("negative_prompt"), str | None)
    if fits:
        return prompt
    msg = (
        'a prompt is a string, {"prompt_token_ids": [ints]} or {"prompt": …, "negative_prompt": …}; nothing was started'
    )
    raise ArgumentError(msg)


def _request_id(request_id: Any) -> str:
    if not isinstance(request_id, str) or not request_id or not is_unicode(request_id):
        msg = f"request_id={request_id!r} is not a non-empty string of Unicode text; nothing was started"
        raise ArgumentError(msg)
    return request_id


def _given(params: Any) -> dict[str, Any] | None:
    """The sampling parameters that were said, if they fit: the engine there may have defaults of its own.

    Raises:
        ArgumentError: they do not.
    """
    checked = sampling_params_from(params)
    if params is None:
        return None
    return {str(name): getattr(checked, str(name)) for name in said_of(params)}
