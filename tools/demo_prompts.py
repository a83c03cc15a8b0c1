"""Writes English prompts with the plans they mean: training and held-out data for the demo's thinker."""

from __future__ import annotations

import hashlib
import random
import string
from dataclasses import dataclass, field

from demo_words import (
    ABOVE,
    ADJECTIVES,
    BELOW,
    BOTTOM,
    CELLS,
    CENTRE,
    CLOSERS,
    COLOUR_WORDS,
    DEFAULT_COLOUR,
    DEFAULT_SHAPE,
    EAST,
    FILLER,
    LEFT,
    OPENERS,
    PLACE_WORDS,
    PLURALS,
    RIGHT,
    SHAPE_WORDS,
    TOP,
    VAGUE_NOUNS,
    WEST,
    Cell,
)
from omni_notebook.models.scene import COLOURS, SHAPES, SceneObject

HELD_OUT_SHARE = 50
"""One prompt in so many, by its hash, is never trained on."""


@dataclass
class Things:
    """The objects a prompt mentions, in order of mention."""

    random: random.Random
    kinds: list[tuple[str, str]] = field(default_factory=list)

    def new(self, *, article: bool = True) -> str:
        """Add an object and return the noun phrase for it."""
        rng = self.random
        colour, shape = rng.choice(COLOURS), rng.choice(SHAPES)
        colour_word, shape_word = rng.choice(COLOUR_WORDS[colour]), rng.choice(SHAPE_WORDS[shape])
        vague = rng.random()
        if vague < 0.02:
            colour, colour_word = DEFAULT_COLOUR, ""
        elif vague < 0.04:
            shape, shape_word = DEFAULT_SHAPE, rng.choice(VAGUE_NOUNS)
        words = [colour_word, shape_word] if colour_word else [shape_word]
        if vague > 0.97:
            words = [shape_word, "in", colour_word]
        if rng.random() < 0.12:
            words.insert(0, rng.choice(ADJECTIVES))
        self.kinds.append((colour, shape))
        return self._article(words[0]) + " ".join(words) if article else " ".join(words)

    def _article(self, following: str) -> str:
        draw = self.random.random()
        if draw < 0.12:
            return ""
        if draw < 0.22:
            return self.random.choice(["the ", "one ", "my ", "some "])
        return "an " if following[0] in "aeiou" else "a "

    def plan(self, *cells: Cell) -> tuple[SceneObject, ...]:
        """Return the mentioned objects at these cells."""
        pairs = zip(self.kinds, cells, strict=True)
        return tuple(SceneObject(colour, shape, *cell) for (colour, shape), cell in pairs)


Example = tuple[str, tuple[SceneObject, ...]]


def _one(rng: random.Random) -> Example:
    things = Things(rng)
    if rng.random() < 0.35:
        return things.new(), things.plan(CENTRE)
    cell = rng.choice(CELLS)
    place = rng.choice(PLACE_WORDS[cell])
    noun = things.new()
    text = f"{place}, {noun}" if rng.random() < 0.2 else f"{noun} {place}"
    return text, things.plan(cell)


def _relation(rng: random.Random) -> Example:
    things = Things(rng)
    words, cells = rng.choice(
        [(ABOVE, (TOP, BOTTOM)), (BELOW, (BOTTOM, TOP)), (LEFT, (WEST, EAST)), (RIGHT, (EAST, WEST))]
    )
    relation = rng.choice(words)
    form = rng.random()
    a, b = things.new(), things.new()
    if form < 0.7:
        linked = rng.choice(["", "", "", "that is ", "which is ", "sitting ", "placed ", "is "])
        return f"{a} {linked}{relation} {b}", things.plan(*cells)
    inverse = cells[::-1]
    if form < 0.85:
        return f"{relation} {a}{rng.choice([' is', ',', ' there is', ' put', ' place'])} {b}", things.plan(*inverse)
    its = {TOP: "above it", BOTTOM: "below it", WEST: "to its left", EAST: "to its right"}
    more = rng.choice(["with {} {}", "and {} {}", "and then {} {}", "that has {} {}"])
    return f"{a} {more.format(b, its[cells[1]])}", things.plan(*cells)


def _pair(rng: random.Random) -> Example:
    things = Things(rng)
    a, b = things.new(), things.new()
    link = rng.choice(["and", "and", "and", "next to", "beside", "with", "plus", "&", "alongside", "followed by", ","])
    return f"{a} {link} {b}".replace(" ,", ","), things.plan(WEST, EAST)


def _pair_placed(rng: random.Random) -> Example:
    things = Things(rng)
    first, second = rng.sample(CELLS, 2)
    a, b = things.new(), things.new()
    link = rng.choice([" and ", ", ", ", and ", " and also ", " with ", "; ", " plus "])
    placed = f"{a} {rng.choice(PLACE_WORDS[first])}"
    if rng.random() < 0.2:
        free = CENTRE if first != CENTRE else EAST
        return f"{placed}{link}{b}", things.plan(first, free)
    return f"{placed}{link}{b} {rng.choice(PLACE_WORDS[second])}", things.plan(first, second)


def _three(rng: random.Random) -> Example:
    things = Things(rng)
    a, b, c = things.new(), things.new(), things.new()
    listed = rng.choice([f"{a}, {b} and {c}", f"{a}, {b}, {c}", f"{a} and {b} and {c}", f"{a}, {b}, and {c}"])
    row, column = (WEST, CENTRE, EAST), (TOP, CENTRE, BOTTOM)
    form = rng.random()
    if form < 0.4:
        return rng.choice(["", "", "a row of ", "from left to right: "]) + listed, things.plan(*row)
    if form < 0.65:
        lead = rng.choice(["a column of ", "from top to bottom: ", "from top to bottom ", "a stack of ", "a tower of "])
        return lead + listed, things.plan(*column)
    cells = rng.sample(CELLS, 3)
    parts = [f"{noun} {rng.choice(PLACE_WORDS[cell])}" for noun, cell in zip((a, b, c), cells, strict=True)]
    return f"{parts[0]}, {parts[1]} and {parts[2]}", things.plan(*cells)


def _several(rng: random.Random) -> Example:
    things = Things(rng)
    count = rng.choice([2, 3])
    noun = things.new(article=False)
    head, _, tail = noun.partition(" in ")
    last = head.rsplit(" ", 1)[-1]
    plural = PLURALS.get(last, last + "s")
    text = f"{rng.choice(['two', '2', 'a pair of'] if count == 2 else ['three', '3'])} {head[: -len(last)]}{plural}"
    text += f" in {tail}" if tail else ""
    things.kinds *= count
    stacked = rng.random()
    if stacked < 0.2:
        cells = (TOP, BOTTOM) if count == 2 else (TOP, CENTRE, BOTTOM)
        return (
            f"{text} {rng.choice(['on top of each other', 'in a column', 'stacked', 'above each other'])}",
            things.plan(*cells),
        )
    row = (WEST, EAST) if count == 2 else (WEST, CENTRE, EAST)
    return text + rng.choice(["", "", " side by side", " in a row", " next to each other"]), things.plan(*row)


def _nonsense(rng: random.Random) -> Example:
    things = Things(rng, [(DEFAULT_COLOUR, DEFAULT_SHAPE)])
    form, length = rng.random(), int(2 ** rng.uniform(0, 6.5))
    if form < 0.1:
        text = ""
    elif form < 0.6:
        text = " ".join(rng.choice(FILLER) for _ in range(max(1, length // 3)))
    elif form < 0.8:
        text = "".join(rng.choice(string.printable) for _ in range(length))
    else:
        start = rng.choice([0x20, 0xA1, 0x400, 0x4E00, 0x1F300, 0x3040, 0x600])
        text = "".join(chr(start + rng.randrange(200)) for _ in range(length))
    return text, things.plan(CENTRE)


_FORMS = (_one, _relation, _pair, _pair_placed, _three, _several)
_WEIGHTS = (22, 38, 10, 14, 12, 4)


def _misspell(text: str, rng: random.Random) -> str:
    words = text.split(" ")
    long = [i for i, word in enumerate(words) if len(word) >= 5 and word.isalpha()]
    if not long:
        return text
    place = rng.choice(long)
    word, at = words[place], rng.randrange(1, len(words[place]) - 1)
    kind = rng.randrange(3)
    if kind == 0:
        word = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    elif kind == 1:
        word = word[:at] + word[at + 1 :]
    else:
        word = word[:at] + word[at] + word[at:]
    words[place] = word
    return " ".join(words)


def example(rng: random.Random) -> Example:
    """Return one prompt and the plan it means."""
    if rng.random() < 0.04:
        return _nonsense(rng)
    text, plan = rng.choices(_FORMS, _WEIGHTS)[0](rng)
    opener = rng.choice(OPENERS)
    text = f"{opener} {text}".strip() + rng.choice(CLOSERS)
    if rng.random() < 0.1:
        text = _misspell(text, rng)
    if rng.random() < 0.1:
        chatter = " ".join(rng.choice(FILLER) for _ in range(rng.randrange(2, 12)))
        text = rng.choice([f"{chatter}. {text}", f"{text}. {chatter}"])
    return text, plan


def is_held_out(text: str) -> bool:
    """Return whether a prompt belongs to the held-out part, by a hash of its text."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest()[:4], "big") % HELD_OUT_SHARE == 0


def make_examples(count: int, seed: int, *, held_out: bool = False) -> list[Example]:
    """Return `count` examples of the training part, or of the held-out part (each prompt once)."""
    rng = random.Random(seed)
    found: list[Example] = []
    seen: set[str] = set()
    while len(found) < count:
        text, plan = example(rng)
        if is_held_out(text) != held_out or (held_out and text in seen):
            continue
        seen.add(text)
        found.append((text, plan))
    return found


def data_hash(examples: list[Example]) -> str:
    """Return a short hash of examples, for the weights' metadata."""
    digest = hashlib.sha256()
    for text, plan in examples:
        digest.update(f"{text}\t{plan}\n".encode("utf-8", "replace"))
    return digest.hexdigest()[:16]
