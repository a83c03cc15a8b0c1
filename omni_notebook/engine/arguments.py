"""Checks of what callers pass; each raises before anything changes."""

from __future__ import annotations

import operator
import os
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from omni_notebook.errors import ArgumentError
from omni_notebook.paths import expanded
from omni_notebook.protocol import PauseMode, is_unicode
from omni_notebook.stages.tensor_source import TensorSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.stages.stage import Stage

LEVELS = (1, 2)


class _Titled(Protocol):
    @property
    def title(self) -> str: ...


class Named(Protocol):
    """What a stage is called, of whichever engine."""

    @property
    def stage_id(self) -> int:
        """Its place."""

    @property
    def config(self) -> _Titled:
        """What has its title."""


S = TypeVar("S", bound=Named)


def pick_stages(stages: Sequence[S], stage_ids: Sequence[int] | int | None) -> list[S]:
    """The named stages, each once, in order; None = all.

    Raises:
        ArgumentError: an empty list or an unknown id.
    """
    if stage_ids is None:
        return list(stages)
    ids = listed("stage_ids", stage_ids)
    if not ids:
        msg = "stage_ids is empty; name stages, or give None for all of them. Nothing changed"
        raise ArgumentError(msg)
    picked = [pick_stage(stages, stage_id) for stage_id in ids]
    return [stage for stage in stages if stage in picked]


def listed(name: str, value: Any) -> list[Any]:
    """A list of what was given, one thing or several."""
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        return [value]
    if isinstance(value, dict):
        msg = f"{name}={value!r} is not a list; nothing changed"
        raise ArgumentError(msg)
    return list(value)


def pick_stage(stages: Sequence[S], stage_id: Any) -> S:
    """The stage with this id.

    Raises:
        ArgumentError: there is none.
    """
    is_number = hasattr(stage_id, "__index__") and not isinstance(stage_id, bool)
    if not is_number or not 0 <= operator.index(stage_id) < len(stages):
        known = ", ".join(f"{s.stage_id} ({s.config.title})" for s in stages)
        msg = f"there is no stage {stage_id!r}; this engine has {known}. Nothing changed"
        raise ArgumentError(msg)
    return stages[operator.index(stage_id)]


def check_below(name: str, value: Any, count: int) -> None:
    """Refuse a number that is not one of 0 … count - 1.

    Raises:
        ArgumentError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        msg = f"there is no {name} {value!r}; this stage has {name}s 0 … {count - 1}"
        raise ArgumentError(msg)


def check_level(level: Any) -> int:
    """1 or 2.

    Raises:
        ArgumentError: anything else.
    """
    if isinstance(level, bool) or level not in LEVELS:
        msg = f"level={level!r}: there are levels 1 (weights kept on the host) and 2 (discarded). Nothing changed"
        raise ArgumentError(msg)
    return int(level)


def check_mode(mode: Any) -> PauseMode:
    """A pause mode.

    Raises:
        ArgumentError: not "abort", "wait" or "keep".
    """
    try:
        return PauseMode(mode)
    except ValueError:
        msg = f"mode={mode!r}: known are {', '.join(repr(str(m)) for m in PauseMode)}. Nothing changed"
        raise ArgumentError(msg) from None


def check_tags(tags: Sequence[str] | str | None, stages: Sequence[Stage]) -> tuple[str, ...] | None:
    """Tags that at least one of the stages has; None = all.

    Raises:
        ArgumentError: an empty list or an unknown tag.
    """
    if tags is None:
        return None
    given = tuple(listed("tags", tags))
    known = sorted({tag for stage in stages for tag in stage.tags})
    wrong = next((tag for tag in given if tag not in known), None)
    if not given or wrong is not None:
        what = "tags is empty" if not given else f"there is no tag {wrong!r}"
        msg = f"{what}; these stages have {', '.join(known)}. Nothing changed"
        raise ArgumentError(msg)
    return given


def check_timeout(timeout: Any, name: str = "timeout") -> float | None:
    """Seconds, or None for the default.

    Raises:
        ArgumentError: not a number of seconds ≥ 0.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
        msg = f"{name}={timeout!r} is not a number of seconds; nothing changed"
        raise ArgumentError(msg)
    return float(timeout)


def check_weights(source: Any) -> str | TensorSource:
    """A folder's path, absolute so that a later change of the working folder does not lose it, or named tensors.

    Raises:
        ArgumentError: it can be neither.
    """
    if isinstance(source, str | os.PathLike):
        return str(expanded(source).resolve())
    kind = type(source).__name__
    if hasattr(source, "state_dict"):
        msg = f"load_weights takes the tensors of a model, not the {kind}: give {kind.lower()}.state_dict()"
    elif isinstance(source, bytes | bytearray) or hasattr(source, "dtype") or not hasattr(source, "__iter__"):
        msg = f"load_weights takes a folder, a mapping or an iterable of (name, tensor), not a {kind}"
    else:
        return TensorSource(source)
    msg += ". Nothing changed"
    raise ArgumentError(msg)


def check_version(version: Any) -> str | None:
    """A name for weights; None = their checksum's start.

    Raises:
        ArgumentError: not a text, an empty one, or not Unicode.
    """
    if version is not None and not (isinstance(version, str) and version.strip() and is_unicode(version)):
        msg = f"version={version!r} is not a non-empty string of Unicode text. Nothing changed"
        raise ArgumentError(msg)
    return version
