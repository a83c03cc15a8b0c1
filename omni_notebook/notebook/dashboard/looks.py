"""Colours, patterns and inks: Okabe and Ito's, each with a pattern and a word; text takes the page's own colours."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING

from omni_notebook.notebook.charts import BLUE, GREEN, GREY, ORANGE, RED, Look
from omni_notebook.protocol import MemoryState

if TYPE_CHECKING:
    from collections.abc import Iterable

SKY, PURPLE, YELLOW = "#56B4E9", "#CC79A7", "#F0E442"

INK = "var(--jp-ui-font-color1, var(--vscode-foreground, #1a1a1a))"
SOFT = "var(--jp-ui-font-color2, var(--vscode-descriptionForeground, #555))"
PAPER = "var(--jp-layout-color1, var(--vscode-editor-background, #fff))"
LINE = "var(--jp-border-color1, var(--vscode-panel-border, #b5b5b5))"
ALARM = "var(--jp-error-color1, var(--vscode-errorForeground, #b3261e))"

TAGS = (
    Look("weights", BLUE, ""),
    Look("kv cache", ORANGE, "//"),
    Look("lora", PURPLE, ".."),
    Look("ballast (filler, no model)", SKY, "xx"),
    Look("other", YELLOW, "--"),
)
"""How memory of each kind of tag is drawn, from the bottom of a stack upwards."""
_KINDS = {"weights": 0, "kv_cache": 1, "ballast": 3}
LEVELS = ("none", "a quarter", "half", "three quarters", "all")
"""What of a group's memory is resident, in words; drawn as ever more of one colour."""
_OPACITY = (0.06, 0.28, 0.5, 0.75, 1.0)
_PATHS = {"//": "M0 6L6 0", "xx": "M0 6L6 0M0 0L6 6", "..": "M3 2V4M2 3H4", "--": "M0 3H6"}
IDS = "omni-ids-"
"""Stands before every id that is drawn; whoever shows a drawing puts a name of its own in its place."""

_BADGES = {
    MemoryState.AWAKE: ("●", GREEN),
    MemoryState.ASLEEP: ("☾", "inherit"),
    MemoryState.FALLING_ASLEEP: ("◐", ORANGE),
    MemoryState.WAKING: ("◐", ORANGE),
    MemoryState.PARTLY_AWAKE: ("◑", SKY),
    MemoryState.NEEDS_WEIGHTS: ("○", YELLOW),
    MemoryState.FAILED: ("✗", RED),
}


_NOT_XML = re.compile("[\\x00-\\x08\\x0b\\x0c\\x0e-\\x1f\\x7f\\ud800-\\udfff\\ufffe\\uffff]")


def text(words: str) -> str:
    """Words of anyone as text of HTML and SVG, in or out of quotes: no markup, nothing that XML can not hold."""
    return escape(_NOT_XML.sub("\N{REPLACEMENT CHARACTER}", words), quote=True)


def kind_of(tag: str) -> int:
    """The place in `TAGS` of a tag's look."""
    return 2 if tag.startswith("lora") else _KINDS.get(tag, len(TAGS) - 1)


def badge(state: MemoryState, *, closed: bool = False, paused: bool = False) -> tuple[str, str]:
    """A sign and a colour for a state; the word stands beside them. What is awake and paused is amber."""
    if closed:
        return "■", GREY
    sign, colour = _BADGES[state]
    return sign, ORANGE if paused and state == MemoryState.AWAKE else colour


def fill(kind: int) -> str:
    """The paint of a kind of tag: its colour, or the pattern over it."""
    look = TAGS[kind]
    return f"url(#{IDS}t{kind})" if look.hatch else look.colour


def patterns(kinds: Iterable[int]) -> str:
    """What `fill` names, for the kinds that have a pattern."""
    made = "".join(
        f'<pattern id="{IDS}t{kind}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect width="6" height="6" fill="{TAGS[kind].colour}"/>'
        f'<path d="{_PATHS[TAGS[kind].hatch]}" stroke="#000" stroke-width="1.1"/></pattern>'
        for kind in kinds
        if TAGS[kind].hatch
    )
    return f"<defs>{made}</defs>" if made else ""


def level_fill(level: int) -> str:
    """The paint of a level of residency, as attributes."""
    return f'fill="{BLUE}" fill-opacity="{_OPACITY[level]}"'


def legend(kinds: Iterable[int], extra: Iterable[tuple[str, str]] = ()) -> str:
    """The kinds' swatches and words as HTML; `extra` are (swatch, word) of what else is drawn."""
    kinds = list(kinds)
    own = [(f'<rect width="14" height="10" fill="{fill(kind)}"/>', TAGS[kind].word) for kind in kinds]
    items = "".join(
        f'<span style="white-space:nowrap;margin-right:14px"><svg aria-hidden="true" width="14" height="10" '
        f'style="vertical-align:-1px;margin-right:5px">{swatch}</svg>{text(word)}</span>'
        for swatch, word in (*own, *extra)
    )
    return f'<div class="omni-legend"><svg aria-hidden="true" width="0" height="0">{patterns(kinds)}</svg>{items}</div>'
