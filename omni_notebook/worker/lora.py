"""One rank's LoRA adapters: a few of them in slots of the pool, the others in host memory, swapped by least recent use.

The base model is not touched: hooks on its layers add the adapters' products to the rows of a batch that name one, and
do nothing for other rows. Ranks of one replica see the same orders and batches, so they choose the same slots.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812

from omni_notebook.errors import ConfigError, LoRAError
from omni_notebook.memory.base import LORA
from omni_notebook.models.lora import check_fits, check_rank, read_adapter, targets
from omni_notebook.worker.reports import LoRAReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from omni_notebook.memory.base import MemoryPool
    from omni_notebook.models.lora import Target
    from omni_notebook.models.parallel import ParallelModel
    from omni_notebook.protocol import LoRARequest

    Matrices = dict[str, tuple[Tensor, Tensor]]


class Loras:
    """The adapters of one rank's model, by their numbers."""

    def __init__(self, model: ParallelModel, pool: MemoryPool, *, slots: int, max_rank: int) -> None:
        self._bank = _Bank(model, pool, slots, max_rank)
        self._max_rank = max_rank
        self._free = list(range(slots))
        self._prepared: dict[int, Matrices] = {}
        self._hosted: dict[int, Matrices] = {}
        self._slots: dict[int, int] = {}  # in order of use, the latest last
        self._pinned: set[int] = set()

    def prepare(self, request: LoRARequest) -> LoRAReport:
        """Read an adapter's share of this rank into host memory; nothing uses it before `commit`.

        Raises:
            ConfigError: its folder is missing, broken or does not fit the model.
        """
        adapter = read_adapter(request.lora_path)
        known = self._bank.targets
        check_fits(adapter, {path: target.whole for path, target in known.items()})
        check_rank(adapter, self._max_rank)
        matrices = {path: known[path].share(pair) for path, pair in adapter.pairs.items()}
        for path, pair in matrices.items():
            if not all(half.isfinite().all() for half in pair):
                msg = f"{adapter.folder}: {path} does not fit the range of {known[path].layer.weight.dtype}"
                raise ConfigError(msg)
        self._prepared[request.lora_int_id] = matrices
        return LoRAReport(digest=adapter.digest, rank=adapter.rank)

    def abort(self, lora_id: int) -> None:
        """Forget a prepared adapter."""
        self._prepared.pop(lora_id, None)

    def commit(self, lora_id: int) -> None:
        """Take a prepared adapter, into a slot if one is free.

        Raises:
            OutOfMemoryError: no room for the slots; nothing changed.
        """
        matrices = self._prepared.pop(lora_id)
        self._bank.make_room(matrices)
        self._hosted[lora_id] = matrices
        if self._free:
            self._bring(lora_id, ())

    def remove(self, lora_id: int) -> None:
        """Forget an adapter, prepared or taken; with the last one the slots' memory goes back."""
        self._prepared.pop(lora_id, None)
        self._hosted.pop(lora_id, None)
        self._pinned.discard(lora_id)
        slot = self._slots.pop(lora_id, None)
        if slot is not None:
            self._bank.clear(slot)
            self._free.append(slot)
        if not self._hosted and not self._slots:
            self._bank.discard()

    def pin(self, lora_id: int) -> None:
        """Put an adapter into a slot for good.

        Raises:
            LoRAError: it is not there, or pinned ones hold every slot.
        """
        self._bring(lora_id, ())
        self._pinned.add(lora_id)

    def unpin(self, lora_id: int) -> None:
        """Let an adapter leave its slot again."""
        self._pinned.discard(lora_id)

    @contextmanager
    def applied(self, lora_ids: Sequence[int]) -> Iterator[bool]:
        """Within it the rows of a batch that the model runs use these adapters, one a row, 0 = none; whether any does.

        A batch of n times as many rows uses them n times over.

        Raises:
            LoRAError: one is not there, or they need more slots than pinned ones leave.
        """
        needed = tuple(dict.fromkeys(lora_id for lora_id in lora_ids if lora_id))
        slots = {lora_id: self._bring(lora_id, needed) for lora_id in needed}
        self._bank.rows = _Rows([slots.get(lora_id) for lora_id in lora_ids]) if needed else None
        try:
            yield bool(needed)
        finally:
            self._bank.rows = None

    def _bring(self, lora_id: int, needed: Sequence[int]) -> int:
        """The slot of an adapter, which is the last used one now; `needed` must stay where they are."""
        slot = self._slots.pop(lora_id, None)
        if slot is None:
            if lora_id not in self._hosted:
                msg = f"adapter {lora_id} is not on this rank; call add_lora(request)"
                raise LoRAError(msg)
            slot = self._free.pop(0) if self._free else self._evict(needed)
            self._bank.write(slot, self._hosted.pop(lora_id))
        self._slots[lora_id] = slot
        return slot

    def _evict(self, needed: Sequence[int]) -> int:
        """The slot of the least recently used adapter, which goes to host memory."""
        leaving = next((i for i in self._slots if i not in self._pinned and i not in needed), None)
        if leaving is None:
            msg = f"no slot is left: {len(self._slots)} of {len(self._slots)} hold adapters that are pinned or needed"
            raise LoRAError(msg)
        slot = self._slots[leaving]
        self._hosted[leaving] = self._bank.read(slot)
        del self._slots[leaving]
        self._bank.clear(slot)
        return slot


class _Rows:
    """Which slot each row of a batch uses, None = none."""

    def __init__(self, slots: Sequence[int | None]) -> None:
        self._slots = slots
        self._groups: dict[int, list[tuple[int, Tensor | None]]] = {}

    def groups(self, output: Tensor) -> list[tuple[int, Tensor | None]]:
        """Each slot with the indices of its rows of a layer's output, None = all of them."""
        n_rows = len(output)
        if n_rows not in self._groups:
            slots = list(self._slots) * (n_rows // len(self._slots))
            used = [slot for slot in dict.fromkeys(slots) if slot is not None]
            rows = {slot: [row for row, other in enumerate(slots) if other == slot] for slot in used}
            self._groups[n_rows] = [
                (slot, None if len(of) == n_rows else torch.tensor(of, device=output.device))
                for slot, of in rows.items()
            ]
        return self._groups[n_rows]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's room: `a` (slots, max rank, in), `b` (slots, max rank, out), and the hook on the layer."""

    a: Tensor
    b: Tensor
    hook: Any


class _Bank:
    """The slots: matrices in the pool for each layer that an adapter names, all in tensors that every level keeps."""

    def __init__(self, model: ParallelModel, pool: MemoryPool, slots: int, max_rank: int) -> None:
        self.targets = targets(model)
        self.rows: _Rows | None = None
        self._parallel = model.parallel
        self._pool = pool
        self._size = (slots, max_rank)
        self._layers: dict[str, _Layer] = {}
        self._ranks: list[dict[str, int]] = [{} for _ in range(slots)]

    def make_room(self, paths: Mapping[str, object]) -> None:
        """Have memory for these layers, in one piece for those that have none."""
        new = {path: self.targets[path] for path in paths if path not in self._layers}
        if not new:
            return
        per_feature = self._size[0] * self._size[1]
        widths = [width for target in new.values() for width in _widths(target)]
        dtype = next(iter(new.values())).layer.weight.dtype
        flat = self._pool.empty((per_feature * sum(widths),), dtype, LORA, recomputable=False)
        self._pool.keep(LORA, [flat])
        parts = iter(flat.split([per_feature * width for width in widths]))
        for path, target in new.items():
            a, b = (next(parts).view(*self._size, width) for width in _widths(target))
            hook = target.layer.register_forward_hook(self._hook(path, a, b, summed=target.summed))
            self._layers[path] = _Layer(a, b, hook)

    @torch.no_grad()
    def write(self, slot: int, matrices: Matrices) -> None:
        """Fill a slot."""
        for path, (a, b) in matrices.items():
            self._layers[path].a[slot, : len(a)] = a
            self._layers[path].b[slot, : len(b)] = b
        self._ranks[slot] = {path: len(a) for path, (a, _b) in matrices.items()}

    def read(self, slot: int) -> Matrices:
        """A copy of what a slot holds, in host memory."""
        return {
            path: (_hosted(self._layers[path].a[slot, :rank]), _hosted(self._layers[path].b[slot, :rank]))
            for path, rank in self._ranks[slot].items()
        }

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        self._ranks[slot] = {}

    def discard(self) -> None:
        """Give the memory back."""
        if not self._layers:
            return
        for layer in self._layers.values():
            layer.hook.remove()
        self._layers.clear()
        self._pool.discard(LORA)

    def _hook(self, path: str, a: Tensor, b: Tensor, *, summed: bool) -> Callable[..., None]:
        def add(_layer: object, args: tuple[Tensor], output: Tensor) -> None:
            """Add to the rows that use an adapter, in target: the others keep their very bytes."""
            if self.rows is None:
                return
            for slot, rows in self.rows.groups(output):
                rank = self._ranks[slot].get(path, 0)
                if not rank:
                    continue
                inner = F.linear(args[0] if rows is None else args[0].index_select(0, rows), a[slot, :rank])
                delta = (self._parallel.all_reduce(inner) if summed else inner) @ b[slot, :rank]
                if rows is None:
                    output.add_(delta)
                else:
                    output.index_add_(0, rows, delta)

        return add


def _hosted(matrix: Tensor) -> Tensor:
    return matrix.to("cpu", copy=True)


def _widths(target: Target) -> tuple[int, int]:
    """The features that this rank's A takes and its B gives."""
    return target.layer.in_features, target.layer.out_features
