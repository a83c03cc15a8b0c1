"""One rank: a pool, a runner and its control orders.

All methods are called by one thread, in order, but for `memory`, `cancel` and `prefetch`, which any thread may call and
which never wait.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_notebook.memory.host import rss_bytes
from omni_notebook.memory.platforms import create_pool
from omni_notebook.protocol import RankStatus
from omni_notebook.worker.ack import AckBuilder
from omni_notebook.worker.ballast import Ballast
from omni_notebook.worker.batches import BATCH_PREFIX, BatchCancelledError, RequestRefusedError
from omni_notebook.worker.control import Control, ControlOrders
from omni_notebook.worker.group import RankGroup
from omni_notebook.worker.outputs import Outputs
from omni_notebook.worker.rank import Rank
from omni_notebook.worker.reports import LoadReport
from omni_notebook.worker.runner import Deferred
from omni_notebook.worker.runners import make_runner
from omni_notebook.worker.weights import Weights

if TYPE_CHECKING:
    from concurrent.futures import Future

    from omni_notebook.protocol import LoRARequest, OmniACK
    from omni_notebook.worker.batches import ImageAnswer, Prefetch
    from omni_notebook.worker.reports import LoRAReport, WorkerSpec
    from omni_notebook.worker.tensors import TensorChunk, TensorHeader


class Worker(ControlOrders):
    """One rank's model and memory."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        config = spec.config
        where = config.device_of(spec.where.replica, spec.where.rank)
        self._pool = create_pool(where, spill_dir=config.spill_dir, backup=config.backup)
        size = spec.tensor_parallel_size or config.tensor_parallel_size
        self._group = RankGroup(size, spec.where.rank, spec.collective_timeout_s, self._pool.device)
        self._runner = make_runner(config, size)
        self._outputs = Outputs()
        self._weights = Weights(self._runner, self._pool)
        self._ballast = Ballast(self._pool, config.ballast_bytes)
        self._device_name = self._pool.device_name
        acks = AckBuilder(spec.where, device=self._pool.device, device_name=self._device_name)
        self._control = Control(
            Rank(
                pool=self._pool,
                runner=self._runner,
                weights=self._weights,
                ballast=self._ballast,
                acks=acks,
                alone=size * config.num_replicas == 1,
            )
        )

    @property
    def uses_processors(self) -> bool:
        """See `Computing`."""
        return self._pool.device == "cpu"

    def open_rendezvous(self) -> str | None:
        """Start the meeting point of several ranks on rank 0 and answer its address; None on every other rank."""
        return self._group.open()

    def join(self, rendezvous: str) -> None:
        """Meet the other ranks; called on all of them at once, before `load`. Nothing to do for one rank by itself.

        Raises:
            JoinError: the others did not come within `collective_timeout_s`.
        """
        self._group.join(rendezvous)

    def load(self) -> LoadReport:
        """Build the model in the pool, load its weights (unless the spec says no), start the background backup.

        Raises:
            ConfigError: the checkpoint does not fit.
            JoinError: one of several ranks, and `join` was not called.
            OutOfMemoryError: no room for it.
        """
        self._runner.build(self._pool, self._group.parallel)
        config = self._spec.config
        self._loras = self._runner.make_loras(self._pool, slots=config.max_loras, max_rank=config.max_lora_rank)
        self._ballast.allocate()
        self._ballast.fill()
        for tag, tensors in self._runner.kept_tensors().items():
            self._pool.keep(tag, tensors)
        if self._spec.load_weights:
            self.load_weights(self._spec.source or self._runner.folder(config.model), self._spec.version)
        return LoadReport(
            pid=os.getpid(),
            device=self._pool.device,
            device_name=self._device_name,
            weight_version=self._weights.version,
            tags=self._spans(),
            arrives=self._control.waking.arrives,
        )

    def _spans(self) -> dict[str, int]:
        return {tag: info.span_bytes for tag, info in self._pool.tags().items()}

    def _restore_tag(self, tag: str) -> None:
        if tag in self._weights.tags:
            self._weights.reload(tags=(tag,))
            self._weights.verify((tag,))
        else:
            self._ballast.fill()

    def shutdown(self) -> None:
        """Finish outputs, leave the other ranks, give all memory back; idempotent, waits for no other rank."""
        self._outputs.close()
        self._control.waking.close()
        self._runner.drop_graphs()
        self._runner.close()
        self._group.close()
        self._pool.close()

    def execute(self, batch: Any) -> Any:
        """Run one batch; every rank of several must be given the same batches in the same order.

        The answer of an AR batch is its tokens; a diffusion batch answers `Executed` when the device is free again, and
        `collect` gives its images.

        A rank that fails leaves the group, because the others have gone on without it: they fail too, and no exchange
        of this batch can meet one of the next.

        Raises:
            PeerLostError: another rank died, failed or did not answer in time; `restart` helps.
            BatchCancelledError: the batch was cancelled, on all ranks at the same step.
            RequestRefusedError: the model can not follow its parameters, on all ranks alike.
        """
        try:
            with self._control.waking.beside():
                outcome = self._runner.execute(batch, lambda: self._weights.version)
        except (BatchCancelledError, RequestRefusedError):
            raise
        except BaseException:
            self._group.close()
            raise
        if not isinstance(outcome, Deferred):
            return outcome
        # The ranks of a group hold the same images: one copies them.
        self._outputs.put(batch.batch_id, outcome.finish if self._spec.where.rank == 0 else list)
        return outcome.answer

    def collect(self, batch_id: str) -> Future[list[ImageAnswer]]:
        """A batch's images when they are copied and encoded; rank 0 has them, the others answer with none.

        Raises:
            ArgumentError: no such batch was executed, or it was collected before.
        """
        return self._outputs.take(batch_id)

    def reached(self, batch_id: str, steps: int) -> Future[bool]:
        """Whether a batch that comes next has made so many steps; False: it ended before."""
        return self._runner.reached(batch_id, steps)

    def barrier(self) -> None:
        """Return once all that was started before is done: the device, the copies of its outputs, prefetches."""
        self._outputs.join()
        self._runner.join_prefetch()
        self._runner.synchronize()

    def ping(self) -> int:
        """The process id: the worker's thread is free."""
        return os.getpid()

    def prepare_weights(self, source: str) -> None:
        """See whether a checkpoint folder fits this rank, before all of them load it.

        Raises:
            ConfigError: it does not; nothing changed.
        """
        self._weights.prepare(Path(source))

    def load_weights(self, source: str, version: str | None) -> str:
        """Load a checkpoint folder into the mapped weights, after `prepare_weights`; the new weight version.

        Raises:
            ConfigError: the checkpoint does not fit; the old weights are untouched.
        """
        self._weights.load(Path(source), version)
        return self._loaded()

    def prepare_tensors(self, headers: tuple[TensorHeader, ...] | None) -> None:
        """Begin to take new weights as tensors; `headers` says which come, None: nobody knows yet.

        Raises:
            ConfigError: they do not fit; nothing changed.
        """
        self._weights.prepare_tensors(headers)

    def load_tensors(self, chunk: TensorChunk) -> None:
        """Write some whole tensors, this rank's part of each, into the mapped weights.

        Raises:
            ConfigError: one does not fit, or none comes any more and one is missing; nothing of this chunk was written.
        """
        self._weights.take(chunk)

    def finish_tensors(self, version: str | None) -> str:
        """All tensors came; the new weight version."""
        self._weights.finish(version)
        return self._loaded()

    def _loaded(self) -> str:
        """New weights are in memory: back them up; a checkpoint stands for a backup only where they came from one."""
        self._pool.set_checkpoint_restorer(None if self._weights.source is None else self._restore_tag)
        self._pool.write_ahead()
        return self._weights.version

    def revoke_weights(self) -> None:
        """Void the weights: another rank could not load its part of them. A wake reloads those from before."""
        self._weights.revoke()

    def set_weight_version(self, version: str) -> None:
        """Name the weights: one name for all ranks, where each has named them by the checksum of its own part."""
        self._weights.version = version

    def weights_valid(self) -> bool:
        """Whether the mapped weights are whole, and were not replaced since the last `prepare_…`."""
        return self._weights.valid and not self._weights.replaced

    # -------------------------------------------------------------------------------- adapters

    def prepare_lora(self, request: LoRARequest) -> LoRAReport:
        """See `Loras.prepare`: read an adapter, before all ranks take it; nothing uses it yet."""
        return self._loras.prepare(request)

    def commit_lora(self, lora_int_id: int) -> dict[str, int]:
        """See `Loras.commit`: take a prepared adapter; the bytes that the rank's tags span now."""
        self._loras.commit(lora_int_id)
        self._pool.write_ahead()
        return self._spans()

    def abort_lora(self, lora_int_id: int) -> None:
        """See `Loras.abort`."""
        self._loras.abort(lora_int_id)

    def remove_lora(self, lora_int_id: int) -> dict[str, int]:
        """See `Loras.remove`; the bytes that the rank's tags span now."""
        self._loras.remove(lora_int_id)
        self._pool.write_ahead()
        return self._spans()

    def pin_lora(self, lora_int_id: int) -> None:
        """See `Loras.pin`."""
        self._loras.pin(lora_int_id)

    def unpin_lora(self, lora_int_id: int) -> None:
        """See `Loras.unpin`."""
        self._loras.unpin(lora_int_id)

    def commit_sleep(self, task_id: str) -> OmniACK:
        """See `SleepOrders.commit_sleep`; what is there for requests is given up too."""
        self._runner.drop_transient()
        return super().commit_sleep(task_id)

    # ------------------------------------------------------------------------ from any thread

    def cancel(self, task_id: str) -> None:
        """Stop an order that has not committed, or a batch that nobody waits for; returns at once."""
        if task_id.startswith(BATCH_PREFIX):
            self._runner.cancel(task_id)
        else:
            self._control.cancel(task_id)

    def prefetch(self, wanted: Prefetch) -> None:
        """Begin to move the next batch's conditioning to the device, whatever runs there; returns at once."""
        self._runner.prefetch(wanted)

    def memory(self) -> RankStatus:
        """This rank's memory, measured now."""
        return RankStatus(
            rank=self._spec.where.rank,
            replica=self._spec.where.replica,
            pid=os.getpid(),
            device=self._pool.device,
            alive=True,
            tags=dict(self._pool.memory()),
            host_backup_bytes=self._pool.host_backup_bytes(),
            process_bytes=rss_bytes(),
        )
