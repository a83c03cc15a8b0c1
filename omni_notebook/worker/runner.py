"""What a worker needs of a model runner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from concurrent.futures import Future
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch

    from omni_notebook.memory.base import MemoryPool
    from omni_notebook.models.parallel import TensorParallel
    from omni_notebook.models.places import Places
    from omni_notebook.protocol import LoRARequest
    from omni_notebook.worker.arriving import Followed
    from omni_notebook.worker.batches import Executed, ImageAnswer, Prefetch
    from omni_notebook.worker.graphs import Recall
    from omni_notebook.worker.reports import LoRAReport


class Loading(Protocol):
    """Where weights come from and go to."""

    @property
    def weight_tags(self) -> tuple[str, ...]:
        """The pool's tags that hold weights; known once the model is built."""
        ...

    def weight_files(self, folder: Path) -> Sequence[Path]:
        """The files of a checkpoint folder that hold weights; raise ConfigError if one is missing."""
        ...

    def check_weights(self, folder: Path) -> None:
        """Raise ConfigError unless the checkpoint folder fits this model; touches nothing."""
        ...

    def load_weights(
        self, folder: Path, between: Callable[[], None] | None = None, tags: Collection[str] | None = None
    ) -> None:
        """Fill parameters from a checkpoint folder, in place; those of `tags`, None = all.

        Raises:
            ConfigError: the checkpoint does not fit; checked before a parameter is touched.
        """
        ...

    def places(self) -> Places:
        """Where tensors that come one by one go."""
        ...


class Synchronizing(Protocol):
    """What control orders need of a runner."""

    def synchronize(self) -> None:
        """Wait until the device has finished all that was started."""
        ...

    def drop_graphs(self) -> None:
        """Give CUDA graphs and their memory up, at level 2."""
        ...

    def recall_graphs(self) -> Recall:
        """After a wake: have the CUDA graphs again that a level 2 gave up, and see that all are right."""
        ...


@runtime_checkable
class ArrivingRunner(Protocol):
    """What a runner has beside whose batches can begin while a wake still copies weights."""

    def tensors_in_order(self) -> Sequence[torch.Tensor]:
        """The weights in the order in which a pass needs them."""
        ...

    def arriving(self, arrivals: Followed) -> AbstractContextManager[None]:
        """Passes meanwhile follow weights that are on their way; until one has come to its end none is a graph's."""
        ...

    def recall_later(self) -> Recall:
        """Instead of `recall_graphs`: graphs are checked as they are used; what can be said of them until then."""
        ...


class Adapters(Protocol):
    """One rank's adapters."""

    def prepare(self, request: LoRARequest) -> LoRAReport:
        """Read an adapter; nothing uses it before `commit`."""
        ...

    def commit(self, lora_id: int) -> None:
        """Take a prepared adapter."""
        ...

    def abort(self, lora_id: int) -> None:
        """Forget a prepared adapter."""
        ...

    def remove(self, lora_id: int) -> None:
        """Forget an adapter, prepared or taken; its memory goes back, with the last one at the latest."""
        ...

    def pin(self, lora_id: int) -> None:
        """Have it on the device for good."""
        ...

    def unpin(self, lora_id: int) -> None:
        """Let it leave the device again."""
        ...


class Runner(Loading, Synchronizing, Protocol):
    """One model on one rank; its memory is in the pool."""

    def make_loras(self, pool: MemoryPool, *, slots: int, max_rank: int) -> Adapters:
        """What holds the model's adapters, once it is built."""
        ...

    def build(self, pool: MemoryPool, parallel: TensorParallel) -> None:
        """Construct the model, or one rank's part of it, with all its memory in `pool`; weights are not valid yet."""
        ...

    def kept_tensors(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """Pool tensors that no checkpoint has (buffers, scales), by tag."""
        ...

    def folder(self, model: str) -> str:
        """Where the files of a configured model are, once it is built."""
        ...

    def execute(self, batch: Any, weight_version: Callable[[], str]) -> Any:
        """Run one batch; its answer, or where outputs are copied and encoded behind it, a `Deferred` one.

        `weight_version` tells which weights are in memory at the moment of the call.
        """
        ...

    def reached(self, batch_id: str, steps: int) -> Future[bool]:
        """Is done once a batch that comes next has made so many steps, or has ended before (False)."""
        ...

    def prefetch(self, wanted: Prefetch) -> None:
        """Begin to move conditioning to the device; returns at once (any thread)."""
        ...

    def join_prefetch(self) -> None:
        """Return once no conditioning is on its way to the device."""
        ...

    def drop_transient(self) -> None:
        """Give up what is on the device for requests (conditioning, half denoised images); they begin again."""
        ...

    def cancel(self, task_id: str) -> None:
        """Stop the batch with this id at its next step, if it is running (any thread)."""
        ...

    def close(self) -> None:
        """End the threads of its own; idempotent."""
        ...


class Deferred(NamedTuple):
    """A batch that is computed, not delivered: its answer now, and what makes its outputs on another thread."""

    answer: Executed
    finish: Callable[[], list[ImageAnswer]]
