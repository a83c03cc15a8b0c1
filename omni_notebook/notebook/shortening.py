"""Errors as one red line."""

from __future__ import annotations

import functools
from typing import TypeVar

_E = TypeVar("_E", bound=BaseException)

_RED, _PLAIN = "\x1b[31m", "\x1b[0m"


def shortened(error: _E) -> _E:
    """The same error, which IPython now renders as one red line and which holds no frames."""
    error.__dict__["_render_traceback_"] = functools.partial(red_line, type(error).__name__, str(error))
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def red_line(kind: str, message: str) -> list[str]:
    """What a cell shows for an error."""
    kind = "KeyboardInterrupt" if kind == "InterruptedVerb" else kind
    return [f"{_RED}{kind}: {' '.join(message.split()) or 'interrupted'}{_PLAIN}"]
