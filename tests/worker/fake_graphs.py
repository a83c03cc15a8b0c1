"""A fake of `torch.cuda` that records what runs in a capture and replays it.

As torch 2.13 does: a capture that fails leaves the capture's stream the current one, and its end fails too.
"""

from __future__ import annotations


class FakeStream:
    def __init__(self, device=None):
        self.device = device

    def wait_stream(self, other):
        pass


class FakeGraph:
    def __init__(self):
        self.recorded = []
        self.ended = False

    def replay(self):
        for work in self.recorded:
            work()

    def reset(self):
        self.ended = True


class FakeCuda:
    """Of `torch.cuda` what graphs call; `breaks`: how many captures fail."""

    Stream, CUDAGraph = FakeStream, FakeGraph

    def __init__(self):
        self.now = self.default = FakeStream()
        self.capturing = None
        self.breaks = 0
        self.captures = []
        self.pools = 0

    def current_stream(self, device):
        assert device == "cpu"
        return self.now

    def set_stream(self, stream):
        self.now = stream

    def graph_pool_handle(self):
        self.pools += 1
        return self.pools

    def stream(self, stream):
        return On(self, stream)

    def graph(self, graph, *, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.captures.append((graph, pool, stream))
        return Capture(self, graph, stream)

    def check(self):
        """A call within the function: the capture's end is what tells that it broke it."""
        if self.capturing is not None and self.breaks:
            msg = "CUDA error: operation not permitted when stream is capturing"
            raise RuntimeError(msg)


class On:
    def __init__(self, cuda, stream):
        self.cuda, self.stream = cuda, stream

    def __enter__(self):
        self.before, self.cuda.now = self.cuda.now, self.stream

    def __exit__(self, *_args):
        self.cuda.now = self.before


class Capture(On):
    def __init__(self, cuda, graph, stream):
        super().__init__(cuda, stream)
        self.graph = graph

    def __enter__(self):
        super().__enter__()
        self.cuda.capturing = self.graph

    def __exit__(self, kind, *args):
        self.cuda.capturing = None
        if kind is not None:
            self.cuda.breaks -= 1
            msg = "CUDA error: operation failed due to a previous error during capture\nsecond line"
            raise RuntimeError(msg)
        super().__exit__(kind, *args)


class Counted:
    """A function whose calls are told apart: by themselves ("itself"), in a capture ("capture"), by a replay."""

    def __init__(self, run, cuda):
        self.run, self.cuda, self.calls = run, cuda, []

    def __call__(self, *inputs):
        graph = self.cuda.capturing
        self.calls.append("itself" if graph is None else "capture")
        output = self.run(*inputs)
        if graph is not None:
            graph.recorded.append(lambda: self._replay(inputs, output))
        return output

    def _replay(self, inputs, output):
        self.calls.append("replay")
        output.copy_(self.run(*inputs))
