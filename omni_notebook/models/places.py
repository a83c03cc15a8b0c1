"""Where a checkpoint's tensors go in a module: their names, their shapes, and the part of each that is held here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_notebook.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor, nn

    Slices = Mapping[str, tuple[slice, ...]]


class Places:
    """A module's tensors by their checkpoint's names.

    A module may name tensors to pass over by a method `checkpoint_ignores(name) -> bool`, and, where it is one
    rank's part of a model, the slices that it holds by `checkpoint_slices()` (the default of `slices`) and the shapes
    of the whole tensors by `checkpoint_wholes()`.
    """

    def __init__(self, module: nn.Module, slices: Slices | None = None) -> None:
        self.targets: dict[str, Tensor] = module.state_dict(keep_vars=True)
        self.parts: Slices = getattr(module, "checkpoint_slices", dict)() if slices is None else slices
        self._wholes: Mapping[str, tuple[int, ...]] = getattr(module, "checkpoint_wholes", dict)()
        self._ignores = getattr(module, "checkpoint_ignores", lambda _name: False)

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor although the module has no place for it."""
        return name not in self.targets and bool(self._ignores(name))

    def missing(self, names: Collection[str]) -> set[str]:
        """The module's tensors that are not among `names`."""
        return self.targets.keys() - set(names)

    def unplaced(self, names: Collection[str]) -> set[str]:
        """Those of `names` that the module has no place for and does not pass over."""
        return {name for name in names if name not in self.targets and not self._ignores(name)}

    def check_shape(self, source: object, name: str, shape: tuple[int, ...]) -> None:
        """Raise ConfigError unless a whole tensor of this shape fits the place of this name."""
        whole = self._wholes.get(name, shape)
        target = tuple(self.targets[name].shape)
        for had, needed in ((shape, whole), (sliced_shape(source, name, shape, self.parts.get(name)), target)):
            if had != needed:
                msg = f"{source}: {name} has shape {had}, the model needs {needed}"
                raise ConfigError(msg)

    def write(self, name: str, index: Sequence[int], start: int, rows: Tensor) -> None:
        """Copy `rows`, which begin at row `start` of `tensor[index]`, as far as they are held here.

        Shapes were checked. Types are converted; the target's address stays.
        """
        target = self.targets[name]
        if target.dim() == 0:
            target, rows = target.reshape(1), rows.reshape(1)
        part = list(self.parts.get(name, ()))
        part += [slice(None)] * (target.dim() - len(part))
        for at, piece in zip(index, part, strict=False):
            first = piece.start or 0
            if not first <= at < first + len(target):
                return
            target = target[at - first]
        piece, *rest = part[len(index) :]
        first = piece.start or 0
        low, high = max(first, start), min(first + len(target), start + len(rows))
        if low < high:
            target[low - first : high - first].copy_(rows[low - start : high - start][(slice(None), *rest)])


def sliced_shape(source: object, name: str, shape: tuple[int, ...], part: tuple[slice, ...] | None) -> tuple[int, ...]:
    """The shape of a tensor's slice; raise ConfigError where the slice has more dimensions than the tensor."""
    if part is None:
        return shape
    if len(part) > len(shape):
        msg = f"{source}: {name} has {len(shape)} dimensions, a slice of {len(part)} was asked for"
        raise ConfigError(msg)
    cut = [len(range(*piece.indices(size))) for piece, size in zip(part, shape, strict=False)]
    return (*cut, *shape[len(cut) :])


def some(names: Collection[str]) -> str:
    """Name up to three tensors, and how many more."""
    listed = sorted(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more
