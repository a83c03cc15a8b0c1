"""Who holds the memory that a wake lacks: the user's largest variables, and other processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from omni_notebook import units
from omni_notebook.protocol import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST = 5
LEAST_BYTES = 1 * MIB
_DEPTH = 3
_ITEMS = 10_000


class Holder(NamedTuple):
    """A variable or a process, and the bytes that it holds."""

    name: str
    kind: str
    n_bytes: int

    def __str__(self) -> str:
        """`activations (Tensor) 512.0 MiB`."""
        return f"{self.name} ({self.kind}) {units.size(self.n_bytes)}"


def variables(namespace: Mapping[str, Any], most: int = MOST) -> list[Holder]:
    """The variables that hold the largest tensors and arrays, in themselves or in what they are made of.

    Storage that several variables share counts for each of them: any one of them keeps it.
    """
    found = [
        Holder(name, type(value).__name__, held_bytes(value))
        for name, value in list(namespace.items())
        if not name.startswith("__") and not isinstance(value, type(sys))
    ]
    large = [holder for holder in found if holder.n_bytes >= LEAST_BYTES]
    return sorted(large, key=lambda holder: -holder.n_bytes)[:most]


def held_bytes(value: Any) -> int:
    """Bytes of the tensors and arrays in a value: each storage once, containers and modules a few levels deep."""
    storages: dict[int, int] = {}
    for one in _arrays(value, _DEPTH):
        key, n_bytes = _storage(one)
        storages[key] = max(storages.get(key, 0), n_bytes)
    return sum(storages.values())


def _arrays(value: Any, depth: int) -> Iterator[Any]:
    if _is_array(value):
        yield value
        gradient = getattr(value, "grad", None) if getattr(value, "is_leaf", False) else None
        if gradient is not None:
            yield gradient
    elif depth > 0:
        for part in _parts(value):
            yield from _arrays(part, depth - 1)


def _is_array(value: Any) -> bool:
    return any(isinstance(value, kind) for kind in (_class("torch", "Tensor"), _class("numpy", "ndarray")) if kind)


def _class(module: str, name: str) -> type | None:
    """A class of a library, if that is loaded: who has not loaded it has nothing of it."""
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())[:_ITEMS]
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)[:_ITEMS]
    module = _class("torch.nn", "Module")
    if module is not None and isinstance(value, module):
        return [*value.parameters(), *value.buffers()]  # type: ignore[attr-defined]  # torch is loaded only if it is
    optimizer = _class("torch.optim", "Optimizer")
    if optimizer is not None and isinstance(value, optimizer):
        return [dict(value.state)]  # type: ignore[attr-defined]
    return list(vars(value).values()) if _is_plain_object(value) else []


def _is_plain_object(value: Any) -> bool:
    """An object of the user's own class: what libraries make is left alone."""
    return hasattr(value, "__dict__") and type(value).__module__ == "__main__" and not isinstance(value, type)


def _storage(value: Any) -> tuple[int, int]:
    """Where an array's memory begins, and how much there is."""
    if hasattr(value, "untyped_storage"):
        storage = value.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    owner = value
    while isinstance(getattr(owner, "base", None), type(value)):
        owner = owner.base
    return owner.__array_interface__["data"][0], owner.nbytes


def processes(most: int = MOST) -> list[Holder]:
    """The largest processes of this machine but this one, by resident memory."""
    found = []
    for process in psutil.process_iter(["pid", "name", "memory_info"]):
        memory = process.info["memory_info"]
        if memory is not None and process.pid != os.getpid():
            found.append(Holder(f"process {process.pid}", process.info["name"] or "?", memory.rss))
    return sorted(found, key=lambda holder: -holder.n_bytes)[:most]


def told(namespace: Mapping[str, Any]) -> str:
    """Who holds memory, in one sentence."""
    own = ", ".join(map(str, variables(namespace))) or f"none above {units.size(LEAST_BYTES)}"
    others = ", ".join(map(str, processes())) or "none"
    mine = units.size(psutil.Process().memory_info().rss)
    return f"this process holds {mine}; its largest variables: {own}; other processes: {others}"
