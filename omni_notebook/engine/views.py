"""How an engine is shown. The layer that people touch says so; this one knows of no notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_notebook.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

_openers: dict[str, Callable[[Any], object]] = {}


def register(name: str, opener: Callable[[Any], object]) -> None:
    """Let `engine.NAME()` call `opener(engine)`; what loading the extension does."""
    _openers[name] = opener


def open_view(name: str, engine: Any) -> Any:
    """What the opener makes.

    Raises:
        UnsupportedError: nothing was registered.
    """
    if name not in _openers:
        msg = f"no notebook is there to show a {name}: %load_ext omni_notebook first, or omni_notebook.{name}(engine)"
        raise UnsupportedError(msg)
    return _openers[name](engine)
