"""What answers at a URL: a server of this package, or a plain vLLM-Omni one, which can less."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from httpx_sse import EventSource

from omni_notebook.engine.answers import failure
from omni_notebook.engine.remote.decoding import acks_of, error_of, output_of
from omni_notebook.engine.remote.line import VERSION, Answer, Waiting
from omni_notebook.engine.remote.schemes import other_scheme
from omni_notebook.errors import ConfigError, OmniError, ServerLostError, SleepError, WakeError
from omni_notebook.protocol import EngineStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from omni_notebook.engine.remote.line import Line
    from omni_notebook.protocol import OmniACK, OmniRequestOutput

OMNI = "/v1/omni"
_OK, _BAD = 200, 400
_NOBODY = "is a server running there (omni-notebook serve MODEL)? Nothing was connected"
_LATE = "it may still be starting: its own line says where it is served once it is ready. Nothing was connected"
_ERRORS = {"sleep": SleepError, "wake": WakeError}


class Server(Protocol):
    """What `RemoteOmni` asks of whoever answers there."""

    host: str | None
    """The name of its machine; None where it did not say."""
    pid: int | None
    """Its process on that machine; None where it did not say."""

    def has(self, what: str) -> None:
        """Return if the server has this call; `what` is named to people.

        Raises:
            UnsupportedError: it has not.
        """

    async def status(self, line: Line) -> EngineStatus:
        """A snapshot, with what is told there."""

    async def sleep(self, line: Line, body: dict[str, Any], *, strict: bool) -> list[OmniACK]:
        """Put stages to sleep."""

    async def wake(self, line: Line, body: dict[str, Any], *, strict: bool) -> list[OmniACK]:
        """Wake stages."""

    def generate(self, line: Line, body: dict[str, Any]) -> AsyncIterator[OmniRequestOutput]:
        """Outputs of one request."""


class Cockpit:
    """A server of this package."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.host: str | None = told.get("host")
        self.pid: int | None = told.get("pid")

    def has(self, what: str) -> None:
        """All of it."""

    async def status(self, line: Line) -> EngineStatus:
        """The snapshot, measured there."""
        answer = await line.get(f"{OMNI}/status")
        try:
            return msgspec.json.decode(answer.content, type=EngineStatus)
        except msgspec.DecodeError as error:
            raise ServerLostError(unread(line, "status", error)) from None

    async def sleep(self, line: Line, body: dict[str, Any], *, strict: bool) -> list[OmniACK]:
        """Put stages to sleep; errors as `AsyncOmni.sleep` raises them."""
        return await self._acks(line, "sleep", f"{OMNI}/sleep", body, strict=strict)

    async def wake(self, line: Line, body: dict[str, Any], *, strict: bool) -> list[OmniACK]:
        """Wake stages; errors as `AsyncOmni.wake_up` raises them."""
        return await self._acks(line, "wake", f"{OMNI}/wakeup", body, strict=strict)

    async def _acks(self, line: Line, order: str, path: str, body: dict[str, Any], *, strict: bool) -> list[OmniACK]:
        acks = acks_from(line, order, await line.order(order, path, body, body.get("timeout")))
        if strict and not all(ack.ok for ack in acks):
            ids, stages = {ack.stage_id for ack in acks}, []
            with contextlib.suppress(OmniError):  # the answers are here, whatever the server does next
                stages = [stage for stage in (await self.status(line)).stages if stage.stage_id in ids]
            raise _ERRORS[order](failure(order, acks, stages), acks)
        return acks

    async def generate(self, line: Line, body: dict[str, Any]) -> AsyncIterator[OmniRequestOutput]:
        """Outputs as they come.

        Raises:
            ServerLostError: the stream ended before the request had.
            OmniError: what `AsyncOmni.generate` raises.
        """
        path, what = f"{OMNI}/generate", f"request {body['request_id']}"
        bound = body.get("timeout")
        if bound is not None:
            bound += body.get("admission_timeout") or 0.0  # counts from the admission
        async with line.stream(what, path, body, bound) as response:
            if response.status_code != _OK:
                raise error_of(response.status_code, await response.aread(), f"POST {line.address.url}{path}")
            async for event in EventSource(response).aiter_sse():
                if event.event == "error":
                    raise error_of(0, event.data.encode(), f"POST {line.address.url}{path}")
                if event.event != "output":
                    continue
                output = _read(line, what, event.data)
                yield output
                if output.finished:
                    return
        raise line.lost(Waiting(what, streamed=True), EOFError("the stream ended before the request had"))


def _read(line: Line, what: str, data: str) -> OmniRequestOutput:
    try:
        return output_of(data)
    except (msgspec.DecodeError, ValueError, OSError) as error:
        raise ServerLostError(unread(line, what, error)) from None


def acks_from(line: Line, order: str, answer: Answer, stage_ids: Sequence[int] | None = None) -> list[OmniACK]:
    """Every rank's answer to an order.

    Raises:
        OmniError: the order was refused, or what came is no answer to it.
    """
    try:
        acks = acks_of(answer.body, stage_ids)
    except msgspec.ValidationError as error:
        raise ServerLostError(unread(line, order, error)) from None
    if acks is not None:
        return acks
    if answer.status == _OK:
        raise ServerLostError(unread(line, order, ValueError("it has no list of ACKs")))
    raise error_of(answer.status, answer.content, f"{line.address.url} ({order})")


def unread(line: Line, what: str, error: Exception) -> str:
    """The message of an answer that can not be read."""
    return (
        f"{line.address.url} answered the {what} with something else than expected ({' '.join(str(error).split())}): "
        "is it another version? engine.status() (%omni status) shows what is true there"
    )


async def meet(line: Line) -> Server:
    """Who answers at the address.

    Raises:
        ServerLostError: nobody.
        ConfigError: another key is wanted, or it is no such server.
    """
    from omni_notebook.engine.remote.plain import Plain  # noqa: PLC0415  (it needs this module)

    try:
        answer = await line.ask("GET", VERSION, now=_NOBODY, late=_LATE)
    except ServerLostError:
        await _check_scheme(line)
        raise
    if answer.status == _BAD:
        await _check_scheme(line)
    _check_key(line, answer)
    if answer.status == _OK and answer.body.get("name") == "omni-notebook":
        return Cockpit(answer.body)
    status = await line.ask("GET", f"{OMNI}/status")
    if status.status == _OK and "stages" in status.body:
        return Cockpit({})
    models = await line.ask("GET", "/v1/models")
    _check_key(line, models)
    if models.status == _OK and isinstance(models.body.get("data"), list) and await _has_sleep(line):
        return Plain(models.body)
    refused = models.body.get("error")
    said = refused.get("message") if isinstance(refused, dict) else None
    msg = (
        f"{line.address.url} is neither a server of omni_notebook nor of vLLM-Omni: it answers GET {VERSION} with "
        f"{answer.status} and GET /v1/models with {models.status}{f' ({said})' if said else ''}; nothing was connected"
    )
    raise ConfigError(msg)


async def _check_scheme(line: Line) -> None:
    """Return unless the other scheme is spoken there.

    Raises:
        ConfigError: names the URL that has it.
    """
    other = await other_scheme(line.address)
    if other is not None:
        speaks = "TLS" if other.startswith("https") else "plain http"
        msg = f"the server at {line.address.url} speaks {speaks}: connect to {other}; nothing was connected"
        raise ConfigError(msg)


def _check_key(line: Line, answer: Answer) -> None:
    if answer.status not in {401, 403}:
        return
    wrong = "wants a key" if line.address.api_key is None else "does not take this key"
    msg = f"{line.address.url} {wrong}: give api_key (--api-key KEY, or OMNI_NOTEBOOK_API_KEY); nothing was connected"
    raise ConfigError(msg)


async def _has_sleep(line: Line) -> bool:
    """Whether its own list of paths, if it shows one, has the specification's orders: others serve models too."""
    listed = await line.ask("GET", "/openapi.json")
    return listed.status != _OK or f"{OMNI}/sleep" in (listed.body.get("paths") or {})


def is_here(server: Server, line: Line) -> bool:
    """Whether the server's machine is this one: by the name it gives, else by the URL.

    A loopback address may be the near end of a tunnel, so what the server says counts first.
    """
    return line.address.is_loopback if server.host is None else server.host == socket.gethostname()
