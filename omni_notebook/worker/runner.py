"""What a worker needs of a model runner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

    from omni_notebook.memory.base import MemoryPool
    from omni_notebook.models.parallel import ParallelModel, TensorParallel
    from omni_notebook.models.places import Places
    from omni_notebook.worker.batches import Executed, ImageAnswer, Prefetch
    from omni_notebook.worker.lora import Loras


class Loading(Protocol):
    """Where weights come from and go to."""

    def check_weights(self, folder: Path) -> None:
        """Raise ConfigError unless the checkpoint folder fits this model; touches nothing."""
        ...

    def load_weights(self, folder: Path, between: Callable[[], None] | None = None) -> None:
        """Fill parameters from a checkpoint folder, in place.

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


class Runner(Loading, Synchronizing, Protocol):
    """One model on one rank; its memory is in the pool. `loras`: its adapters, set once it is built."""

    loras: Loras

    @property
    def model(self) -> ParallelModel:
        """The model."""
        ...

    def build(self, pool: MemoryPool, parallel: TensorParallel) -> None:
        """Construct the model, or one rank's part of it, with all its memory in `pool`; weights are not valid yet."""
        ...

    def reset_buffers(self) -> None:
        """Recompute buffers that no checkpoint has."""
        ...

    def kept_tensors(self) -> Sequence[torch.Tensor]:
        """Pool tensors that no checkpoint has (buffers, scales)."""
        ...

    def execute(self, batch: Any, weight_version: Callable[[], str]) -> Any:
        """Run one batch; its answer, or where outputs are copied and encoded behind it, a `Deferred` one.

        `weight_version` tells which weights are in memory at the moment of the call.
        """
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
