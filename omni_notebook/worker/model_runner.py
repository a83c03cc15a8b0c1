"""What our runners share: a module built on meta, moved into the pool, filled in place."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch

from omni_notebook.memory.base import WEIGHTS
from omni_notebook.memory.device.capturing import synchronize
from omni_notebook.models.loaders import check_fits, checkpoint_dtype, checkpoint_files, load_into
from omni_notebook.models.places import Places
from omni_notebook.worker.arriving import Execution
from omni_notebook.worker.graphs import NO_GRAPHS, Graphs, Recall
from omni_notebook.worker.lora import Loras

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from omni_notebook.config import StageConfig
    from omni_notebook.memory.base import MemoryPool
    from omni_notebook.memory.reading import FileReader
    from omni_notebook.models.parallel import ParallelModel
    from omni_notebook.worker.arriving import Followed
    from omni_notebook.worker.batches import Prefetch

CPU_DTYPE = torch.float32
"""`dtype="auto"` on a CPU: half types are slower there and not batch-invariant."""


def torch_dtype(name: str, device: str, files: Callable[[], Iterable[Path]]) -> torch.dtype:
    """The torch type of a configured `dtype`; "auto" on other devices than a CPU is that of the checkpoint's files."""
    if name != "auto":
        kind: torch.dtype = getattr(torch, name)
        return kind
    return CPU_DTYPE if device == "cpu" else checkpoint_dtype(files())


class ModelRunner:
    """One module in the pool; a subclass executes it."""

    _model: ParallelModel
    _device = "cpu"
    _reader: FileReader | None = None
    _graphs: Graphs | None = None
    loras: Loras
    weight_tags = (WEIGHTS,)

    @property
    def model(self) -> ParallelModel:
        """The module."""
        return self._model

    def make_loras(self, pool: MemoryPool, *, slots: int, max_rank: int) -> Loras:
        """Slots for adapters beside the model."""
        self.loras = Loras(self._model, pool, slots=slots, max_rank=max_rank)
        return self.loras

    def _place(self, make: Callable[[], ParallelModel], dtype: torch.dtype, pool: MemoryPool) -> None:
        with torch.device("meta"):
            self._model = make().eval()
        for parameter in self._model.parameters():  # not `.to`: it would cast buffers too
            parameter.data = parameter.data.to(dtype)
        self._device, self._reader = pool.device, pool.reader()
        pool.adopt(self._model, WEIGHTS)
        self.reset_buffers()
        self._execution = Execution(self._model)

    def check_weights(self, folder: Path) -> None:
        """Raise ConfigError unless the checkpoint folder fits this model; touches nothing."""
        check_fits(self._model, folder)

    def weight_files(self, folder: Path) -> Sequence[Path]:
        """The checkpoint's safetensors files."""
        return checkpoint_files(folder)

    def folder(self, model: str) -> str:
        """The model is a folder."""
        return model

    def load_weights(
        self,
        folder: Path,
        between: Callable[[], None] | None = None,
        tags: Collection[str] | None = None,  # noqa: ARG002  (there is one tag)
    ) -> None:
        """Fill the parameters in place; `between` is called before each tensor and may raise."""
        load_into(self._model, folder, between=between, reader=self._reader)

    def places(self) -> Places:
        """Where tensors that come one by one go."""
        return Places(self._model)

    def reset_buffers(self) -> None:
        """Recompute what no checkpoint has."""
        reset: Callable[[], None] = self._model.reset_buffers  # type: ignore[assignment]
        reset()

    def kept_tensors(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """Pool tensors that no checkpoint has."""
        return {WEIGHTS: list(self._model.buffers())}

    def cancel(self, task_id: str) -> None:
        """Stop a batch early, where a runner can; the others end soon by themselves (any thread)."""

    def reached(self, batch_id: str, steps: int) -> Future[bool]:  # noqa: ARG002  (nobody asks a batch of ours)
        """Never, where a runner does not count."""
        never: Future[bool] = Future()
        never.set_result(False)
        return never

    def prefetch(self, wanted: Prefetch) -> None:
        """Nothing, where a model has no conditioning."""

    def join_prefetch(self) -> None:
        """Nothing is on its way."""

    def drop_transient(self) -> None:
        """Nothing is there."""

    def _graphed(self, run: Callable[..., torch.Tensor], config: StageConfig) -> Callable[..., torch.Tensor]:
        """`run` by CUDA graphs, where they are wanted and no other rank takes part in it."""
        if self._device == "cpu" or not config.cuda_graphs or self._model.parallel.size > 1:
            return run
        self._graphs = Graphs(run, self._device)
        return self._graphs

    def tensors_in_order(self) -> Sequence[torch.Tensor]:
        """The weights in the order in which a pass needs them."""
        return self._execution.tensors()

    @contextlib.contextmanager
    def arriving(self, arrivals: Followed) -> Iterator[None]:
        """See `ArrivingRunner.arriving`."""
        graphs = self._graphs
        if graphs is None:
            with self._execution.following(arrivals):
                yield
            return
        with graphs.skipped(), self._execution.following(arrivals, graphs.use_again):
            yield

    def drop_graphs(self) -> None:
        """See `Runner.drop_graphs`."""
        if self._graphs is not None:
            self._graphs.forget()

    def recall_graphs(self) -> Recall:
        """See `Runner.recall_graphs`."""
        return NO_GRAPHS if self._graphs is None else self._graphs.recall()

    def recall_later(self) -> Recall:
        """See `ArrivingRunner.recall_later`."""
        return NO_GRAPHS if self._graphs is None else self._graphs.check_later()

    def synchronize(self) -> None:
        """Wait for the device."""
        synchronize(self._device)

    def close(self) -> None:
        """No threads."""
