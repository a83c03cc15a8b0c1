"""Errors across a process border: what a rank raised comes back as the same class where the class is known here."""

from __future__ import annotations

import builtins
import traceback
from importlib import import_module
from typing import Any

import msgspec

from omni_notebook.errors import OmniError, RemoteWorkerError, rebuilt

_OURS = "omni_notebook"


class Fault(msgspec.Struct, array_like=True):
    """An exception in plain types; `args` and `attributes` hold what of it is plain."""

    module: str
    name: str
    message: str
    args: list[Any]
    attributes: dict[str, Any]
    traceback: str


def describe(error: BaseException) -> Fault:
    """An exception as it goes over the wire; never raises."""
    kind = type(error)
    attributes = {key: plain for key, value in vars(error).items() if (plain := _plain(value)) is not _LOST}
    if isinstance(error, OSError) and error.filename is not None:
        attributes["filename"] = _unicode(str(error.filename))
    return Fault(
        module=kind.__module__,
        name=kind.__qualname__,
        message=_text(error),
        args=[_unicode(str(arg)) if (plain := _plain(arg)) is _LOST else plain for arg in error.args],
        attributes=attributes,
        traceback=_unicode("".join(traceback.format_exception(error))),
    )


def shortened(fault: Fault, n_bytes: int) -> Fault:
    """The same in no more bytes: begin and end of long texts, and what else is long of it left out."""
    for characters in (n_bytes // 16, n_bytes // 64, n_bytes // 256):
        shorter = Fault(
            module=fault.module,
            name=fault.name,
            message=_ends(fault.message, characters),
            args=[_short(arg, characters, "(left out)") for arg in fault.args],
            attributes={
                key: kept
                for key, value in fault.attributes.items()
                if (kept := _short(value, characters, _LOST)) is not _LOST
            },
            traceback=_ends(fault.traceback, characters),
        )
        if len(msgspec.msgpack.encode(shorter)) <= n_bytes:
            return shorter
    message = _ends(fault.message, n_bytes // 16)
    return Fault(module=fault.module, name=fault.name, message=message, args=[message], attributes={}, traceback="")


def _short(value: Any, characters: int, left_out: Any) -> Any:
    if isinstance(value, str):
        return _ends(value, characters)
    return value if len(msgspec.msgpack.encode(value)) <= characters else left_out


def _ends(text: str, characters: int) -> str:
    if len(text) <= characters:
        return text
    half = characters // 2
    return f"{text[:half]} … ({len(text) - 2 * half} characters left out) … {text[-half:]}"


_LOST = object()


def _plain(value: Any) -> Any:
    """`value` as plain types, or `_LOST`."""
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return _LOST


def _text(error: BaseException) -> str:
    try:
        return _unicode(str(error))
    except Exception as second:  # noqa: BLE001  (someone's broken __str__ must not hide the error)
        return f"(its message can not be had: {type(second).__name__})"


def _unicode(text: str) -> str:
    """Text that can be sent; what a broken file name brings in is escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def rebuild(fault: Fault) -> BaseException:
    """The exception that a rank raised, with its traceback's text as `remote_traceback`."""
    error = _ours(fault) or _builtin(fault) or _foreign(fault)
    error.remote_traceback = fault.traceback  # type: ignore[attr-defined]
    return error


def _ours(fault: Fault) -> BaseException | None:
    """One of our own errors, by state: constructors differ."""
    if fault.module.partition(".")[0] != _OURS:
        return None
    kind = getattr(import_module(fault.module), fault.name, None)
    if not (isinstance(kind, type) and issubclass(kind, OmniError)):
        return None
    return rebuilt(kind, tuple(fault.args), fault.attributes)


def _builtin(fault: Fault) -> BaseException | None:
    """One of Python's own; not those that end a program."""
    kind = getattr(builtins, fault.name, None) if fault.module == "builtins" else None
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return None
    args = list(fault.args)
    if issubclass(kind, OSError) and len(args) == 2 and "filename" in fault.attributes:
        args.append(fault.attributes.pop("filename"))
    try:
        error = kind(*args)
    except Exception:  # noqa: BLE001  (a constructor that wants something else: it comes back as a foreign error)
        return None
    error.__dict__.update(fault.attributes)
    return error


def _foreign(fault: Fault) -> BaseException:
    name = fault.name if fault.module == "builtins" else f"{fault.module}.{fault.name}"
    return RemoteWorkerError(f"{name}: {fault.message}", type_name=fault.name)
