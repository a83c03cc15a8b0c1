"""Stages as a request names them, as the numbers that the engine takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_notebook.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.verbs.engine_api import Engine


def numbers(engine: Engine, stage_ids: Sequence[int | str] | None) -> list[int] | None:
    """The stages' numbers; None = all. Unknown numbers are left to the engine to refuse.

    Raises:
        ArgumentError: no stage has this name, or several have; nothing was changed.
    """
    if stage_ids is None:
        return None
    named = any(isinstance(one, str) for one in stage_ids)
    names = [(stage.name, stage.stage_id) for stage in engine.status().stages] if named else []
    return [_known(one, names) if isinstance(one, str) else one for one in stage_ids]


def number(engine: Engine, stage_id: int | str) -> int:
    """The stage's number; an unknown one is left to the engine to refuse.

    Raises:
        ArgumentError: no stage has this name, or several have; nothing was changed.
    """
    found = numbers(engine, [stage_id])
    return found[0] if found else -1


def asked(stage_id: str) -> int | str:
    """A stage as it stands behind a `?`, where all is text."""
    return int(stage_id) if stage_id.isascii() and stage_id.isdecimal() and len(stage_id) < 10 else stage_id


def _known(name: str, names: Sequence[tuple[str, int]]) -> int:
    found = [
        stage_id for known, stage_id in names if known == name and not name.isdecimal()
    ]  # a folder may be called 7
    if len(found) == 1:
        return found[0]
    have = ", ".join(f"{stage_id} ({known})" for known, stage_id in names)
    what = f"several stages are called {name!r}, name it by number" if found else f"there is no stage {name!r}"
    msg = f"{what}; this engine has {have}. Nothing changed"
    raise ArgumentError(msg)
