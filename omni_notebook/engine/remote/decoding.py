"""What a server answers, as the types of this package: errors, ACKs, outputs."""

from __future__ import annotations

import builtins
import contextlib
import io
from typing import TYPE_CHECKING, Any

import msgspec

from omni_notebook import errors
from omni_notebook.protocol import AckMetadata, CompletionOutput, OmniACK, OmniRequestOutput

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MOST_SHOWN = 300


def _kinds(kind: type[errors.OmniError] = errors.OmniError) -> Iterator[type[errors.OmniError]]:
    for below in kind.__subclasses__():
        if below.__module__ == errors.__name__:
            yield below
            yield from _kinds(below)


_NEEDED = {"BUSY": "stage_id", "OUT_OF_MEMORY": "needed_bytes", "WORKER_DIED": "rank"}
"""What an error of these classes always has: the server's own "too many at once" has the code of a busy stage."""
_OF_CODE = {kind.error_code: kind for kind in _kinds() if kind.error_code != errors.OmniError.error_code}
_OF_CODE["ENDED"] = errors.EngineClosedError


_NO_SUCH_CALL = frozenset({404, 405})


def object_of(content: bytes) -> dict[str, Any]:
    """The JSON object that an answer's body is; empty if it is none."""
    try:
        found = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeError):
        return {}
    return found if isinstance(found, dict) else {}


def error_of(status: int, content: bytes, where: str) -> Exception:
    """The error that a refusal stands for: class, message and attributes as they were raised on the server.

    Args:
        status: of HTTP.
        content: the body.
        where: method and URL, for bodies that say nothing.
    """
    body = object_of(content)
    found = body.get("error")
    if status in _NO_SUCH_CALL and not (isinstance(found, dict) and found.get("code") not in {None, "HTTP"}):
        msg = f"{where} answered {status}: the server has no such call (an older version?); nothing was changed there"
        return errors.UnsupportedError(msg)
    if not isinstance(found, dict) or not isinstance(found.get("message"), str):
        told = body.get("detail") or content[:MOST_SHOWN].decode(errors="replace").strip() or "nothing more was said"
        return _by_status(status, f"{where} answered {status}: {told}")
    code, message = str(found.get("code")), found["message"]
    details = found.get("details") if isinstance(found.get("details"), dict) else {}
    known = {str(key): value for key, value in (details or {}).items() if not str(key).startswith("_")}
    if code in _OF_CODE and _NEEDED.get(code, "") in {"", *known}:
        if code in {errors.SleepError.error_code, errors.WakeError.error_code}:
            known["acks"] = _acks_told(body)
        return errors.rebuilt(_OF_CODE[code], (message,), known)
    if "type_name" in known:
        return _raised_there(message, known)
    error = _by_status(status, message)
    error.__dict__.update(known)
    if type(error) is errors.OmniError:
        error.error_code = code
    return error


def _acks_told(body: dict[str, Any]) -> list[OmniACK]:
    """Those of a failed order; none of what can not be read, so that the failure itself is told."""
    with contextlib.suppress(msgspec.ValidationError):
        return acks_of(body) or []
    return []


_SIGNALS = (StopIteration, StopAsyncIteration)
"""Python's own words for an end: a coroutine can not raise them."""


def _raised_there(message: str, known: dict[str, Any]) -> Exception:
    """What a model or a library raised in a rank: an error of Python's own as that, as `AsyncOmni` raises it."""
    kind = getattr(builtins, str(known["type_name"]), None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _SIGNALS):
        with contextlib.suppress(TypeError):  # one that takes more than a message
            return kind(message)
    given = {"error_code": known["type_name"], "remote_traceback": "", **known}
    return errors.rebuilt(errors.RemoteWorkerError, (message,), given)


def _by_status(status: int, message: str) -> errors.OmniError:
    """For a server that names no class of ours."""
    kinds: dict[int, type[errors.OmniError]] = {
        400: errors.ArgumentError,
        401: errors.ConfigError,
        404: errors.UnsupportedError,
        405: errors.UnsupportedError,
        422: errors.ArgumentError,
        501: errors.UnsupportedError,
        504: errors.DeadlineError,
    }
    return kinds.get(status, errors.OmniError)(message)


def acks_of(body: dict[str, Any], stage_ids: Sequence[int] | None = None) -> list[OmniACK] | None:
    """Every rank's answer; None if there is no list of them. `stage_ids` are those of the order.

    Raises:
        msgspec.ValidationError: one is not an ACK.
    """
    listed = body.get("acks")
    return None if not isinstance(listed, list) else [_ack(one, stage_ids) for one in listed]


_PLAIN_SOURCE = "vLLM-Omni"
NOT_TOLD = "told by a plain vLLM-Omni server: what is null it did not tell, and nobody cross-checked freed_bytes"
UNKNOWN = -1
"""Stands for a stage or rank that a server did not name."""


def _ack(found: Any, stage_ids: Sequence[int] | None) -> OmniACK:
    """An ACK; one with fewer figures than ours has null for those, and says so in its note."""
    if not isinstance(found, dict):
        return msgspec.convert(found, OmniACK)
    stage = stage_ids[0] if stage_ids is not None and len(stage_ids) == 1 else UNKNOWN
    unsaid = {"task_id": "", "stage_id": stage, "rank": UNKNOWN, "freed_bytes": 0, "metadata": {}}
    ack = msgspec.convert({**unsaid, **{key: value for key, value in found.items() if value is not None}}, OmniACK)
    if "noop" not in ack.metadata:
        ack.metadata = _filled(ack.metadata)
    return ack


def _filled(told: dict[str, Any]) -> dict[str, Any]:
    """Metadata with all keys: what was told and fits, null for the rest; `told` is what came, word for word."""
    filled: dict[str, Any] = {**AckMetadata(source=_PLAIN_SOURCE).to_dict(), "total_freed_gib": None}
    for field in msgspec.structs.fields(AckMetadata):
        with contextlib.suppress(msgspec.ValidationError):
            if field.name in told:
                filled[field.name] = msgspec.to_builtins(msgspec.convert(told[field.name], field.type, strict=False))
    return {**filled, "note": filled["note"] or NOT_TOLD, "told": told}


def output_of(data: str) -> OmniRequestOutput:
    """One output of a request; its images are opened from their PNG files.

    Raises:
        msgspec.ValidationError: it is none.
    """
    found: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
    png = msgspec.convert(found.pop("png", []), list[bytes])  # base64
    outputs = msgspec.convert(found.pop("outputs", []), list[CompletionOutput])
    made = msgspec.convert({**found, "outputs": [], "png": [], "images": []}, OmniRequestOutput)
    made.outputs, made.png, made.images = outputs, png, [opened(one) for one in png]
    return made


def opened(png: bytes) -> Any:
    """A PIL image from a PNG file."""
    from PIL import Image  # noqa: PLC0415  (loaded when there is a picture)

    image = Image.open(io.BytesIO(png))
    image.load()
    return image
