"""One rank inside a vLLM worker: our orders over vLLM's model and memory.

Orders come one at a time on the worker's own thread. A second thread tells the host what memory there is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from omni_notebook.errors import UnsupportedError
from omni_notebook.memory.base import WEIGHTS
from omni_notebook.memory.host import rss_bytes
from omni_notebook.models.lora import read_adapter
from omni_notebook.protocol import RankStatus
from omni_notebook.worker.ack import AckBuilder
from omni_notebook.worker.ballast import Ballast
from omni_notebook.worker.control import Control, ControlOrders
from omni_notebook.worker.faults import describe, shortened
from omni_notebook.worker.methods import signature
from omni_notebook.worker.rank import Rank
from omni_notebook.worker.reports import LoadReport, LoRAReport
from omni_notebook.worker.vllm.memory import adopt, keep, make_pool
from omni_notebook.worker.vllm.runner import VllmRunner
from omni_notebook.worker.vllm.wire import MESSAGE_BYTES, UNASKED, Attach, RankReply, RankSample, packed
from omni_notebook.worker.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_notebook.protocol import LoRARequest
    from omni_notebook.worker.tensors import TensorHeader

TICK_S = 0.5
"""How often memory is measured while nothing is ordered."""
SEND_AGAIN_S = (0.01, 0.1, 1.0)
"""A reply that could not be sent is tried again after so long each."""
_GONE = frozenset({errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOENT, errno.ENOTCONN, errno.EPIPE})
"""There is no host any more, and nobody waits."""


class VllmRank(ControlOrders):
    """Owns the memory of one vLLM worker: its parameters, buffers and KV cache are moved into our pool.

    Args:
        worker: vLLM's worker.
        attach: what it belongs to.
    """

    def __init__(self, worker: Any, attach: Attach) -> None:
        spec = attach.spec
        self._where = msgspec.structs.replace(spec.where, rank=worker.rank)
        self._size = spec.config.tensor_parallel_size
        self._link = _Link(attach.address)
        self._pool = make_pool(worker, spec.config)
        self._runner = VllmRunner(worker, None if attach.source is None else Path(attach.source))
        self._weights = Weights(self._runner, self._pool)
        self._ballast = Ballast(self._pool, spec.config.ballast_bytes)
        acks = AckBuilder(self._where, device=self._pool.device, device_name=self._pool.device_name)
        self._control = Control(
            Rank(
                pool=self._pool,
                runner=self._runner,
                weights=self._weights,
                ballast=self._ballast,
                acks=acks,
                alone=self._size * spec.config.num_replicas == 1,
            )
        )
        for name in ("sleep", "wake_up"):  # the host refuses the latter sooner, where it is asked there
            setattr(worker, name, self._refusal(name))
        self._source = self._runner.loaded
        self._version = spec.version
        self._prepared: dict[int, LoRARequest] = {}
        self._pinned: set[int] = set()
        there = {None} if self._source is None else {None, spec.config.model}
        self._other = None if spec.source in there else Path(str(spec.source))
        _tick(self.sample)

    def _refusal(self, name: str) -> Callable[..., None]:
        """What stands in the place of vLLM's own `sleep` and `wake_up`, which would move memory behind our books.

        Only the last rank raises: vLLM reads ranks' answers in order, and leaves those behind an error unread.
        """

        def refuse(*_args: Any, **_known: Any) -> None:
            stage = self._where.stage_id
            msg = (
                f"vLLM's own {name}() was called under stage {stage}, whose memory has other books; it was refused, "
                f"memory is as it was, and only requests that vLLM had ended before it asked are lost. Call "
                f"sleep(stage_ids=[{stage}]) or wake_up(stage_ids=[{stage}]) of the engine"
            )
            error = UnsupportedError(msg)
            self._link.send(RankReply(UNASKED, self._where.rank, b"", describe(error)))
            if self._where.rank == self._size - 1:
                raise error

        return refuse

    def answer(self, number: int, method: str, arguments: bytes) -> None:
        """Carry out one order; the answer goes to the host."""
        try:
            value = packed(self._run(method, arguments))
            reply = RankReply(number, self._where.rank, value, None)
        except BaseException as error:  # noqa: BLE001  (it belongs to whoever ordered)
            reply = RankReply(number, self._where.rank, b"", describe(error))
        self.sample()
        self._link.send(reply)

    def _run(self, method: str, arguments: bytes) -> Any:
        order = getattr(self, method, None) if method in ORDERS else None
        if order is None:
            msg = f"a vLLM rank has no order {method!r}; nothing was called"
            raise UnsupportedError(msg)
        with torch.inference_mode():
            return order(*msgspec.msgpack.decode(arguments, type=signature(method).args))

    def sample(self) -> None:
        """Send this rank's memory, if it can be measured and the host still listens; any thread, never raises."""
        with contextlib.suppress(Exception):  # neither an answer nor the thread that measures may end with it
            self._link.send(RankSample(self.memory()), news_only=True)

    def memory(self) -> RankStatus:
        """This rank's memory, measured now; any thread, never waits."""
        return RankStatus(
            rank=self._where.rank,
            replica=self._where.replica,
            pid=os.getpid(),
            device=self._pool.device,
            alive=True,
            tags=dict(self._pool.memory()),
            host_backup_bytes=self._pool.host_backup_bytes(),
            process_bytes=rss_bytes(),
        )

    # ---------------------------------------------------------------------------------- orders

    def load(self) -> LoadReport:
        """Take over what vLLM has loaded, name the weights, begin the background backup.

        Where the stage had other weights before it was restarted, they are loaded over vLLM's.
        """
        adopt(self._runner.worker, self._runner.modules(), self._pool)
        self._ballast.allocate()
        self._ballast.fill()
        keep(self._pool, self._runner.kept_tensors())
        self._weights.adopt(self._source, self._version)
        if self._other is not None:
            self._weights.load(self._other, self._version)
        self._runner.make_ready()
        self._backed_up()
        return LoadReport(
            pid=os.getpid(),
            device=self._pool.device,
            device_name=self._pool.device_name,
            weight_version=self._weights.version,
            tags=self._spans(),
        )

    def _spans(self) -> dict[str, int]:
        return {tag: info.span_bytes for tag, info in self._pool.tags().items()}

    def _backed_up(self) -> None:
        self._pool.set_checkpoint_restorer(None if self._weights.source is None else self._restore_tag)
        self._pool.write_ahead()

    def _restore_tag(self, tag: str) -> None:
        if tag == WEIGHTS:
            self._weights.reload()
            self._weights.verify()
        else:
            self._ballast.fill()

    def barrier(self) -> None:
        """Return once the device has done all that was started."""
        self._runner.synchronize()

    def ping(self) -> int:
        """The process id: the worker's thread is free."""
        return os.getpid()

    def prepare_weights(self, source: str) -> None:
        """See `Worker.prepare_weights`."""
        self._weights.prepare(Path(source))

    def load_weights(self, source: str, version: str | None) -> str:
        """See `Worker.load_weights`."""
        self._weights.load(Path(source), version)
        self._backed_up()
        return self._weights.version

    def prepare_tensors(self, headers: tuple[TensorHeader, ...] | None) -> None:
        """Refuse weights that come as tensors.

        Raises:
            UnsupportedError: vLLM's loaders take checkpoints; says what to do.
        """
        self._weights.prepare_tensors(headers)

    def revoke_weights(self) -> None:
        """See `Worker.revoke_weights`."""
        self._weights.revoke()

    def set_weight_version(self, version: str) -> None:
        """See `Worker.set_weight_version`."""
        self._weights.version = version

    def weights_valid(self) -> bool:
        """See `Worker.weights_valid`."""
        return self._weights.valid and not self._weights.replaced

    # An engine's own `add_lora` and so on would reach the same calls of the worker; but vLLM reads ranks' answers in
    # order, leaves those behind an error unread, and takes them for the next order's.

    def prepare_lora(self, request: LoRARequest) -> LoRAReport:
        """Read an adapter's folder; vLLM takes it at the commit.

        Raises:
            ConfigError: it is missing or broken.
        """
        adapter = read_adapter(request.lora_path)
        self._prepared[request.lora_int_id] = request
        return LoRAReport(digest=adapter.digest, rank=adapter.rank)

    @torch.inference_mode(mode=False)  # as where vLLM calls it
    def commit_lora(self, lora_int_id: int) -> dict[str, int]:
        """Take an adapter; what the rank's tags span now: vLLM made room when it loaded the model.

        Raises:
            Exception: vLLM does not take it.
        """
        self._runner.add_adapter(self._prepared.pop(lora_int_id))
        return self._spans()

    def abort_lora(self, lora_int_id: int) -> None:
        """Nothing was taken."""
        self._prepared.pop(lora_int_id, None)

    @torch.inference_mode(mode=False)
    def remove_lora(self, lora_int_id: int) -> dict[str, int]:
        """Forget an adapter, if it is there; what the rank's tags span now."""
        self._runner.remove_adapter(lora_int_id)
        self._pinned.discard(lora_int_id)
        return self._spans()

    @torch.inference_mode(mode=False)
    def pin_lora(self, lora_int_id: int) -> None:
        """Keep an adapter in its slot.

        Raises:
            Exception: vLLM can not.
        """
        self._runner.pin_adapter(lora_int_id)
        self._pinned.add(lora_int_id)

    def unpin_lora(self, lora_int_id: int) -> None:
        """Take a pin back.

        Raises:
            UnsupportedError: there is one here, and vLLM can not.
        """
        if lora_int_id in self._pinned:
            msg = f"vLLM can not unpin adapter {lora_int_id}; remove it and add it again"
            raise UnsupportedError(msg)


ORDERS = frozenset(
    {
        "abort_lora",
        "abort_sleep",
        "abort_wake",
        "barrier",
        "commit_lora",
        "commit_sleep",
        "commit_wake",
        "drop_backup",
        "load",
        "load_weights",
        "noop",
        "pin_lora",
        "ping",
        "prepare_lora",
        "prepare_tensors",
        "prepare_sleep",
        "prepare_wake",
        "prepare_weights",
        "remove_lora",
        "revoke_weights",
        "set_weight_version",
        "undo",
        "unpin_lora",
        "weights_valid",
    }
)


class _Link:
    """Datagrams to the host; each is one message, whole or not at all."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.connect(address)
        self._lock = threading.Lock()
        self._last = b""

    def send(self, message: RankReply | RankSample, *, news_only: bool = False) -> None:
        """Send, unless the host is gone or it is no news; never raises, for vLLM would mistake ranks' answers then.

        Where the system has no memory for a reply it is tried again; one that never goes is told to the stage's log,
        and its order ends at the deadline.
        """
        data = packed(message)
        if len(data) > MESSAGE_BYTES and isinstance(message, RankReply):
            data = packed(_fitting(message))
        with self._lock:
            if news_only and data == self._last:
                return
            error = self._tried(data)
            for wait_s in () if news_only else SEND_AGAIN_S:
                if error is None or error.errno in _GONE:
                    break
                time.sleep(wait_s)
                error = self._tried(data)
            if news_only and error is None:
                self._last = data
        if isinstance(message, RankReply) and error is not None and error.errno not in _GONE:
            sys.stderr.write(f"rank {message.rank} could not send its answer: {error}\n")

    def _tried(self, data: bytes) -> OSError | None:
        try:
            self._socket.send(data)
        except OSError as error:
            return error
        return None


def _fitting(reply: RankReply) -> RankReply:
    """An error that is too long for a datagram, shorter; in the place of a value that is, an error."""
    size = len(reply.value)
    fault = reply.fault or describe(
        UnsupportedError(f"the answer has {size} bytes, a message no more than {MESSAGE_BYTES}")
    )
    return RankReply(reply.number, reply.rank, b"", shortened(fault, MESSAGE_BYTES))


def _tick(tick: Callable[[], None]) -> None:
    """Call `tick` now and then, on a thread of its own."""

    def run() -> None:
        while True:
            time.sleep(TICK_S)
            tick()

    threading.Thread(target=run, name="omni-memory", daemon=True).start()
