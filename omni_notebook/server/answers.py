"""What goes back: ACKs with one status, and an error of ours as a status code with one line."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import JSONResponse

from omni_notebook import errors
from omni_notebook.protocol import AckStatus
from omni_notebook.server.helping import in_requests, requests_that_help

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.protocol import OmniACK
    from omni_notebook.verbs.engine_api import Engine


class AbortedError(errors.OmniError):
    """A request was ended by an order before it had what it was for."""

    error_code = "ABORTED"


PYTHON_WORDS: ContextVar[bool] = ContextVar("PYTHON_WORDS", default=False)
"""Whether the request's client reads messages as the engine raised them; `guards.WordsGuard` sets it."""
RETRY_S = 5
"""What a client that met a closed gate is told to wait; a person must open it, so nobody knows better."""
LONGEST = 2000
"""Characters of a message."""
_STATUS: tuple[tuple[type[BaseException], int], ...] = (
    (errors.ArgumentError, 422),
    (errors.ConfigError, 422),
    (errors.UnsupportedError, 501),
    (errors.LedgerError, 501),
    (errors.StageBusyError, 409),
    (errors.PauseError, 409),
    (errors.LoRAError, 409),
    (AbortedError, 409),
    (errors.AsleepError, 503),
    (errors.PausedError, 503),
    (errors.NeedsWeightsError, 503),
    (errors.StageFailedError, 503),
    (errors.EngineClosedError, 503),
    (errors.DeadlineError, 504),
    (errors.OutOfMemoryError, 507),
)
"""The first that fits counts."""
_RETRY = (errors.AsleepError, errors.PausedError, errors.NeedsWeightsError)
_HELPS = (errors.StageFailedError, errors.PauseError)
_ACK_STATUS = {"DEADLINE": 504, "OUT_OF_MEMORY": 507}
_NO_DETAILS = frozenset({"acks", "error_code"})
"""They have places of their own in the body."""


def problem(error: errors.OmniError, engine: Engine, *, order: bool = False, text_only: bool = False) -> JSONResponse:
    """An error of ours, in OpenAI's form; where something is closed, `help` has the requests that open it.

    `text_only`: see `requests_that_help`.
    `order`: what was refused is an order, which its own state forbids, and not a request that may come again.
    """
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    retry = isinstance(error, _RETRY)
    helping = requests_that_help(engine.status(), text_only=text_only) if retry or isinstance(error, _HELPS) else []
    if order and (retry or isinstance(error, errors.StageFailedError)):
        return _answer(409, error, None, helping)
    headers = {"Retry-After": str(RETRY_S)} if retry else None
    if isinstance(error, AbortedError):
        headers = {"x-should-retry": "false"}  # OpenAI's client asks again at 409
    return _answer(status, error, headers, helping)


def _answer(
    status: int, error: errors.OmniError, headers: dict[str, str] | None, helping: list[dict[str, Any]]
) -> JSONResponse:
    body = _body(status, str(error), error.error_code)
    details, acks = _details(error), getattr(error, "acks", None)
    if details:
        body["error"]["details"] = details
    if helping:
        body["help"] = helping
    if acks:
        body["acks"] = msgspec.to_builtins(acks)
    return JSONResponse(body, status, headers=headers)


def _details(error: errors.OmniError) -> dict[str, Any]:
    """The error's own attributes, those that JSON can hold."""
    found: dict[str, Any] = {}
    for name, value in vars(error).items():
        if not name.startswith("_") and name not in _NO_DETAILS:
            with contextlib.suppress(TypeError, ValueError):
                found[name] = msgspec.json.decode(msgspec.json.encode(value))
    return found


def refusal(status: int, message: str, code: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """One line about what is wrong."""
    return JSONResponse(_body(status, message, code), status, headers=headers)


def unforeseen(error: BaseException) -> JSONResponse:
    """What nobody foresaw; the server's log has its traceback."""
    return refusal(500, f"an error of the server's own: {type(error).__name__}; its log says more", "BUG")


def _body(status: int, message: str, code: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"status": "ERROR", "error": {"message": _line(message), "type": kind, "code": code}}


def unbroken(data: bytes) -> bytes:
    """JSON without the characters at which some clients end a line of an event stream, though JSON does not."""
    for letter in "\x85\u2028\u2029":
        data = data.replace(letter.encode(), f"\\u{ord(letter):04x}".encode())
    return data


def event(kind: str, data: bytes) -> bytes:
    """A server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), unbroken(data))


def _line(message: str) -> str:
    """One line of a length that can be read, whatever the client sent that it repeats."""
    line = " ".join(message.split())
    said = line[:LONGEST] if PYTHON_WORDS.get() else in_requests(line[:LONGEST])
    return said if len(line) <= LONGEST else f"{said} … ({len(line)} characters)"


class _Encoded(JSONResponse):
    """What msgspec encodes: ACKs of many ranks five times as fast as by way of dicts."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return msgspec.json.encode(content)


def acks_answer(acks: Sequence[OmniACK]) -> JSONResponse:
    """`{"status", "acks"}`: SUCCESS if all ranks did it, SKIPPED if there was nothing to do, else ERROR."""
    failed = [ack for ack in acks if ack.status != AckStatus.SUCCESS]
    if not failed:
        done = "SKIPPED" if acks and all(ack.metadata["noop"] for ack in acks) else "SUCCESS"
        return _Encoded({"status": done, "acks": acks})
    first = failed[0]
    code = first.metadata["error_code"] or "RANK_ERROR"
    message = f"stage {first.stage_id} rank {first.rank}: {first.error_msg}"
    error = {"message": _line(message), "type": "server_error", "code": code}
    return _Encoded({"status": "ERROR", "acks": acks, "error": error}, _ACK_STATUS.get(code, 500))
