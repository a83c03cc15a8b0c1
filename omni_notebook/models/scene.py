"""The plan language between the demo's two stages: what a scene may hold, its text and its token ids (no torch).

A plan is one to three objects, `colour shape row column`, joined by `;`, no two in the same cell:

    red star top center; blue circle bottom center
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Okabe and Ito, "Color Universal Design" (2008), with red and purple moved towards what their names promise.
PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (204, 30, 40),
    "orange": (240, 140, 0),
    "yellow": (245, 215, 40),
    "green": (0, 158, 95),
    "blue": (0, 98, 190),
    "purple": (120, 50, 160),
    "pink": (235, 120, 180),
    "black": (20, 20, 20),
}
COLOURS = tuple(PALETTE)
SHAPES = ("circle", "square", "triangle", "star", "heart", "diamond", "cross", "ring")
ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "center", "right")
SEPARATOR = ";"
FIELDS = (COLOURS, SHAPES, ROWS, COLUMNS)
PLAN_WORDS = (*COLOURS, *SHAPES, *ROWS, *COLUMNS, SEPARATOR)
MAX_OBJECTS = 3
PLAN_LENGTH = MAX_OBJECTS * len(FIELDS) + MAX_OBJECTS - 1
"""Tokens in the longest plan; the diffusion model's conditioning has this many places."""
NULL_ID = 0
"""The plan id of an empty place; a plan of nothing but null ids is the unconditional one."""
PLAN_VOCAB_SIZE = len(PLAN_WORDS) + 1
BACKGROUND = (255, 255, 255)

_PLAN_IDS = {word: index for index, word in enumerate(PLAN_WORDS, start=1)}


@dataclass(frozen=True, slots=True)
class SceneObject:
    """One coloured symbol in one of nine cells."""

    colour: str
    shape: str
    row: str = "middle"
    column: str = "center"

    def __post_init__(self) -> None:
        """Raise ValueError, naming the word, when a field holds a word that the plan language lacks."""
        words = (self.colour, self.shape, self.row, self.column)
        for word, allowed, field in zip(words, FIELDS, ("colour", "shape", "row", "column"), strict=True):
            if word not in allowed:
                msg = f"{word!r} is no {field} of a plan; one of {', '.join(allowed)}"
                raise ValueError(msg)

    @property
    def cell(self) -> int:
        """The cell's number, 0 to 8, row by row from the top left."""
        return ROWS.index(self.row) * len(COLUMNS) + COLUMNS.index(self.column)

    def __str__(self) -> str:
        """Return the object's four words."""
        return f"{self.colour} {self.shape} {self.row} {self.column}"


Plan = tuple[SceneObject, ...]


def check_plan(plan: Sequence[SceneObject]) -> None:
    """Raise ValueError unless the plan has one to three objects in different cells."""
    if not 1 <= len(plan) <= MAX_OBJECTS:
        msg = f"a plan has 1 to {MAX_OBJECTS} objects, not {len(plan)}"
        raise ValueError(msg)
    if len({item.cell for item in plan}) != len(plan):
        msg = f"two objects share a cell: {format_plan(plan)!r}"
        raise ValueError(msg)


def format_plan(plan: Sequence[SceneObject]) -> str:
    """Return the plan's text."""
    return f"{SEPARATOR} ".join(str(item) for item in plan)


def parse_plan(text: str) -> Plan:
    """Read a plan's text; raise ValueError, naming what is wrong, when it is not a valid plan."""
    plan = tuple(_parse_object(part) for part in text.split(SEPARATOR))
    check_plan(plan)
    return plan


def random_plans(count: int, seed: int) -> list[Plan]:
    """Return valid plans drawn evenly over counts, cells, shapes and colours."""
    rng = random.Random(seed)  # noqa: S311  (pictures, not secrets)
    cells = range(len(ROWS) * len(COLUMNS))
    return [
        tuple(
            SceneObject(rng.choice(COLOURS), rng.choice(SHAPES), ROWS[cell // 3], COLUMNS[cell % 3])
            for cell in rng.sample(cells, rng.randint(1, MAX_OBJECTS))
        )
        for _ in range(count)
    ]


def _parse_object(text: str) -> SceneObject:
    words = text.split()
    if len(words) != len(FIELDS):
        msg = f"an object is 'colour shape row column', not {text.strip()!r}"
        raise ValueError(msg)
    return SceneObject(*words)


def encode_plan(plan: Sequence[SceneObject] | str) -> list[int]:
    """Return the diffusion model's plan ids: `PLAN_LENGTH` ints, null-padded, one for each token of the plan's text.

    Place i corresponds to the i-th token that the thinker wrote, so that its hidden states line up with the ids.
    Raises ValueError for an invalid plan.
    """
    objects = parse_plan(plan) if isinstance(plan, str) else tuple(plan)
    check_plan(objects)
    words = format_plan(objects).replace(SEPARATOR, f" {SEPARATOR}").split()
    return [_PLAN_IDS[word] for word in words] + [NULL_ID] * (PLAN_LENGTH - len(words))


def decode_plan(ids: Sequence[int]) -> Plan:
    """Return the plan that `encode_plan` gave these ids for; raise ValueError when there is none."""
    words = [PLAN_WORDS[index - 1] for index in ids if index != NULL_ID]
    return parse_plan(" ".join(words))
