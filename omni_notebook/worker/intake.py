"""Takes tensors that come one after the other into a model's memory, each checked before it is written."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import torch

from omni_notebook.errors import ConfigError
from omni_notebook.models.places import some
from omni_notebook.worker.tensors import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.models.places import Places
    from omni_notebook.worker.tensors import TensorChunk, TensorHeader, TensorPart

SOURCE = "new weights"


class Intake:
    """One load of whole tensors; a rank of several keeps its own part of each."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._came = _Came()

    def check_all(self, headers: Sequence[TensorHeader]) -> None:
        """Raise ConfigError unless these are just the tensors that the model needs."""
        counts = Counter(header.name for header in headers)
        for name, count in counts.items():
            if count > 1:
                raise _twice(name)
        for header in headers:
            self._check(header)
        self._check_whole(set(counts))

    def check(self, chunk: TensorChunk) -> None:
        """Raise ConfigError unless each part fits where it comes, and none is missing after the last chunk."""
        came = _Came(set(self._came.whole), self._came.name, self._came.items)
        for part in chunk.parts:
            came.add(part)
            self._check(part.header)
        if chunk.last:
            self._check_whole(came.whole)

    def _check_whole(self, names: set[str]) -> None:
        if missing := self._places.missing(names):
            msg = f"{SOURCE}: {some(missing)}: not given"
            raise ConfigError(msg)

    def _check(self, header: TensorHeader) -> None:
        if self._places.ignores(header.name):
            return
        if self._places.unplaced([header.name]):
            msg = f"{SOURCE}: the model has no place for {header.name}"
            raise ConfigError(msg)
        self._places.check_shape(SOURCE, header.name, header.shape)
        target = self._places.targets[header.name].dtype
        if _type(header).is_floating_point != target.is_floating_point:
            msg = f"{SOURCE}: {header.name} is {header.dtype}, the model's is {str(target).removeprefix('torch.')}"
            raise ConfigError(msg)

    @torch.no_grad()
    def write(self, chunk: TensorChunk) -> None:
        """Copy a checked chunk's parts into place, converting types."""
        for part in chunk.parts:
            self._came.add(part)
            if len(part.data) and not self._places.ignores(part.header.name):
                self._places.write(part.header.name, part.place, part.start, _rows(part))


class _Came:
    """What came so far: tensors that are `whole`, and how many items of the tensor `name` that is not."""

    def __init__(self, whole: set[str] | None = None, name: str = "", items: int = 0) -> None:
        self.whole = whole or set()
        self.name = name
        self.items = items

    def add(self, part: TensorPart) -> None:
        """Raise ConfigError unless this part follows the last one."""
        header = part.header
        if header.name in self.whole:
            raise _twice(header.name)
        n_items = (part.stop - part.start) * part.row_items
        before = self.items if self.name == header.name else 0
        if part.first_item != before or len(part.data) != n_items * ITEM_BYTES[header.dtype]:
            msg = f"{SOURCE}: {header.name}: its parts do not follow one another"
            raise ConfigError(msg)
        self.name, self.items = header.name, before + n_items
        if self.items == math.prod(header.shape):
            self.whole.add(header.name)
            self.name, self.items = "", 0


def _rows(part: TensorPart) -> torch.Tensor:
    """The part's bytes as what they are."""
    values = torch.from_numpy(part.data).view(_type(part.header))
    return values.reshape(part.stop - part.start, *part.header.sizes[len(part.place) + 1 :])


def _type(header: TensorHeader) -> torch.dtype:
    kind: torch.dtype = getattr(torch, header.dtype)
    return kind


def _twice(name: str) -> ConfigError:
    return ConfigError(f"{SOURCE}: {name} was given twice")
