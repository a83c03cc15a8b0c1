"""CUDA graphs of a model's forward pass: captured once a shape, replayed for every batch of that shape.

Replaying launches all kernels at once, where small batches otherwise wait for Python. A graph remembers addresses: it
stays valid over a sleep of level 1, after which these are mapped again. A level 2 gives the graphs up too, and `recall`
captures them again. Source: CUDA graphs in torch (`torch.cuda.graph`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from omni_notebook.memory.device.capturing import CAPTURING
from omni_notebook.models.parallel import first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_log = logging.getLogger(__name__)

_MOST = 16
"""Shapes beyond so many run without a graph."""
_WARM_UPS = 2
"""Runs before a capture, in which libraries choose kernels and take their workspaces."""

_RECALL_S = 5.0
"""How long a wake goes on to the next graph: it must end within its own time, which graphs are no reason to miss."""

Key = tuple[tuple[torch.Size, torch.dtype] | None, ...]


class _Graph(NamedTuple):
    """One captured pass over its own copies of the inputs."""

    graph: Any
    inputs: tuple[torch.Tensor | None, ...]
    output: torch.Tensor


class Recall(NamedTuple):
    """Whether every graph was replayed and is right (None: there are no graphs), and what a person should know."""

    right: bool | None
    note: str | None


NO_GRAPHS = Recall(None, None)


class Graphs:
    """Calls a function of tensors (or None) by graphs; every output is a graph's, from the first call of a shape on.

    The function must do the same kernels for the same shapes, and writing twice what it writes must do no harm. One
    thread at a time; other threads may use the device meanwhile. Where a graph can not be captured, or is not right,
    the function is called without graphs from then on, and the next `recall` says why.

    Args:
        run: the function; one tensor comes out.
        device: where its inputs are.
        cuda: `torch.cuda`.
    """

    def __init__(self, run: Callable[..., torch.Tensor], device: str, *, cuda: Any = torch.cuda) -> None:
        self._run = run
        self._device = device
        self._cuda = cuda
        self._graphs: dict[Key, _Graph] = {}
        self._known: list[Key] = []
        self._unchecked: set[Key] = set()
        self._stream: Any = None
        self._pool: Any = None
        self._off = False
        self._skipping = False
        self._untold: str | None = None

    def __len__(self) -> int:
        return len(self._graphs)

    @torch.inference_mode()  # as in `recall`: inputs of a graph that was captured so take no others' values outside
    def __call__(self, *inputs: torch.Tensor | None) -> torch.Tensor:
        """What the function gives for these inputs."""
        if self._skipping:
            return self._run(*inputs)
        key = tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in inputs)
        graph = self._graphs.get(key) or self._made(key, inputs)
        if graph is None:
            return self._run(*inputs)
        for own, given in zip(graph.inputs, inputs, strict=True):
            if own is not None and given is not None:
                own.copy_(given)
        graph.graph.replay()
        output = graph.output.clone()
        return self._checked(key, inputs, output) if key in self._unchecked else output

    def _checked(self, key: Key, inputs: Sequence[torch.Tensor | None], its: torch.Tensor) -> torch.Tensor:
        """What the function itself gives, behind `its`, which a graph has given for the same."""
        self._unchecked.discard(key)
        mine = self._run(*inputs)
        if not _are_same(mine, its):
            self._give_up("one gave other bytes than the model")
        return mine

    def check_later(self) -> Recall:
        """Instead of `recall`, where what the function writes to is in use: each graph is checked at its next use.

        That is done on the inputs of that use, so that nothing is written but what the function writes for them.
        """
        self._unchecked = set(self._graphs)
        later = Recall(None, "each CUDA graph is checked at its next use") if self._graphs else NO_GRAPHS
        return self._told() or later

    @contextlib.contextmanager
    def skipped(self) -> Iterator[None]:
        """While this lasts the function is called without graphs: not all that they read is there; see `use_again`."""
        self._skipping = True
        try:
            yield
        finally:
            self._skipping = False

    def use_again(self) -> None:
        """End `skipped` before its time: all is there."""
        self._skipping = False

    def _made(self, key: Key, inputs: Sequence[torch.Tensor | None]) -> _Graph | None:
        """A new graph; None where there is none (any more)."""
        if self._off or len(self._graphs) >= _MOST:
            return None
        own = tuple(None if tensor is None else tensor.clone() for tensor in inputs)
        self._warm_up(own)
        try:
            graph = self._graphs[key] = self._capture(own)
        except RuntimeError as error:
            self._give_up(first_line(error))
            return None
        if key not in self._known:
            self._known.append(key)
        return graph

    def _warm_up(self, inputs: Sequence[torch.Tensor | None]) -> None:
        """Run as in the capture: on one stream for all of them, or they share neither memory nor workspaces."""
        cuda = self._cuda
        self._stream = self._stream or cuda.Stream(self._device)
        self._stream.wait_stream(cuda.current_stream(self._device))
        with cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                self._run(*inputs)
        cuda.current_stream(self._device).wait_stream(self._stream)

    def _capture(self, inputs: tuple[torch.Tensor | None, ...]) -> _Graph:
        cuda = self._cuda
        self._pool = self._pool or cuda.graph_pool_handle()
        graph, before = cuda.CUDAGraph(), cuda.current_stream(self._device)
        with CAPTURING:
            try:
                with cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    output = self._run(*inputs)
            except BaseException:
                cuda.set_stream(before)  # torch does not leave the capture's, where a capture fails
                raise
        return _Graph(graph, inputs, output)

    def forget(self) -> None:
        """Give the graphs and their memory up; `recall` makes them again."""
        self._forget(tuple(self._graphs))
        self._unchecked.clear()
        self._pool = None

    def _forget(self, keys: Sequence[Key]) -> None:
        for key in keys:
            graph = self._graphs.pop(key, None)
            if graph is not None:
                graph.graph.reset()

    @torch.inference_mode()
    def recall(self) -> Recall:
        """Have all graphs again that there ever were, and replay each once on zeros, beside the function itself.

        What the function writes for zeros must be nobody's then; see `check_later`.
        If one gives other bytes, or can not be captured, the function is called without graphs from now on. Those that
        there is no time for are captured with the next batch of their shape.
        """
        started = time.perf_counter()
        self._unchecked.clear()
        known = () if self._off else tuple(self._known)
        had, checked, wrong = set(self._graphs), 0, 0
        try:
            for key in known:
                if checked and time.perf_counter() - started > _RECALL_S:
                    self._forget(known[checked:])
                    break
                wrong += not self._is_right(key)
                checked += 1
        except RuntimeError as error:
            self._give_up(first_line(error))
        if wrong:
            self._give_up(f"{wrong} of {checked} gave other bytes than the model")
        told = self._told()
        if told is not None:
            return told
        if not known:
            return NO_GRAPHS
        took_ms, missing = (time.perf_counter() - started) * 1e3, len(set(known[:checked]) - had)
        words = [f"{missing} CUDA graphs captured again in {took_ms:.0f} ms"] if missing else []
        if checked < len(known):
            words.append(f"{len(known) - checked} CUDA graphs are left to their next batches")
        return Recall(True, "; ".join(words) or None)

    def _told(self) -> Recall | None:
        """Why graphs were given up, once."""
        if self._untold is None:
            return None
        why, self._untold = self._untold, None
        return Recall(False, f"this stage runs without CUDA graphs from now on: {why}")

    def _give_up(self, why: str) -> None:
        self.forget()
        self._off, self._untold = True, why
        _log.warning("CUDA graphs are given up, batches run without them: %s", why)

    def _is_right(self, key: Key) -> bool:
        inputs = [None if one is None else torch.zeros(one[0], dtype=one[1], device=self._device) for one in key]
        its = self(*inputs)
        return _are_same(self._run(*inputs), its)


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
