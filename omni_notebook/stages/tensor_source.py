"""Named tensors that a person gives: gone through on a thread of its own, handed on in chunks of bounded size."""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from omni_notebook.errors import ConfigError
from omni_notebook.protocol import MIB, is_unicode
from omni_notebook.worker.tensors import ITEM_BYTES, TensorChunk, TensorHeader, TensorPart

if TYPE_CHECKING:
    import numpy as np

CHUNK_BYTES = 8 * MIB
"""Small enough that packing one, which the engine's loop does, keeps it from nothing else (about 3 ms)."""
CHUNK_PARTS = 4096
"""So that endless small or empty tensors are handed on, and refused, instead of being collected here."""


class TensorSource:
    """Names and tensors, asked for by one order on the engine's loop; a `next` that never returns holds nothing else.

    Attributes:
        twice: whether it can be gone through again, so that all of it is looked at before any of it is written.
    """

    def __init__(self, given: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        self.twice = isinstance(given, Collection)
        self._given = given
        self._asked: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._chunks: Iterator[TensorChunk] | None = None
        self._over = threading.Event()

    def headers(self) -> asyncio.Future[Answer]:
        """All names, types and shapes (a tuple of `TensorHeader`) of a source that can be gone through twice."""
        return self._ask(self._read_headers)

    def chunk(self) -> asyncio.Future[Answer]:
        """The next `TensorChunk`."""
        return self._ask(self._read_chunk)

    def _ask(self, work: Callable[[], Any]) -> asyncio.Future[Answer]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="omni-tensors", daemon=True)
            self._thread.start()
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked.put(_Question(work, future))
        return future

    def close(self) -> None:
        """Let go of the tensors; the thread asks for no other one, and ends as soon as it has its hands free."""
        self._over.set()
        self._given = ()
        self._asked.put(None)

    # ------------------------------------------------------------------------------ on the thread

    def _serve(self) -> None:
        while (question := self._asked.get()) is not None:
            answer = _carry_out(question.work)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                question.future.get_loop().call_soon_threadsafe(_deliver, question.future, answer)
            del question, answer  # they hold tensors, and this thread may wait here for long
        self._chunks = None

    def _read_headers(self) -> tuple[TensorHeader, ...]:
        return tuple(header_of(name, tensor) for name, tensor in _pairs(self._given, self._over))

    def _read_chunk(self) -> TensorChunk:
        if self._chunks is None:
            self._chunks = chunks_of(_pairs(self._given, self._over))
        return next(self._chunks)


class Answer(NamedTuple):
    """What came, or why it can not be used: an error that began in the person's own code has it as `__cause__`."""

    value: Any
    error: ConfigError | None


class _Question(NamedTuple):
    work: Callable[[], Any]
    future: asyncio.Future[Answer]


def _deliver(future: asyncio.Future[Answer], answer: Answer) -> None:
    if not future.done():
        future.set_result(answer)


def _carry_out(work: Callable[[], Any]) -> Answer:
    try:
        return Answer(work(), None)
    except BaseException as error:  # noqa: BLE001  (a person's tensors may fail in any way; the order answers for it)
        traceback.clear_frames(error.__traceback__)  # whoever keeps the error must not keep our chunks
        return Answer(None, error if isinstance(error, ConfigError) else _caused(error, "reading a tensor"))


def _caused(error: BaseException, what: str) -> ConfigError:
    said = " ".join(str(error).split())
    found = ConfigError(f"{what} raised {type(error).__name__}{': ' if said else ''}{said}")
    found.__cause__ = error
    return found


def _pairs(given: Mapping[str, Any] | Iterable[tuple[str, Any]], over: threading.Event) -> Iterator[tuple[str, Any]]:
    """Each name and tensor; holds none of them while it goes on to the next.

    Raises:
        ConfigError: an item is no such pair, the person's own code raised, or the load is `over`.
    """
    source = given.items() if isinstance(given, Mapping) else given
    count = 0
    try:
        iterator = iter(source)
        for pair in iterator:
            count += 1
            yield _checked_pair(pair, count)
            del pair
            _check_wanted(over)
    except (ConfigError, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001  (whatever it is, the order answers for it)
        theirs = None if error.__traceback__ is None else error.__traceback__.tb_next
        raise _caused(error, f"the iterator, after {count} tensors,") from error.with_traceback(theirs)


def _check_wanted(over: threading.Event) -> None:
    if over.is_set():
        msg = "nobody waits for these tensors any more"
        raise ConfigError(msg)


def _checked_pair(pair: Any, count: int) -> tuple[str, Any]:
    if isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str):
        if not is_unicode(pair[0]):
            msg = f"the name of item {count}, {pair[0]!a}, is not Unicode text"
            raise ConfigError(msg)
        return pair[0], pair[1]
    msg = f"item {count} is a {type(pair).__name__}, not a (name, tensor) pair"
    raise ConfigError(msg)


# ------------------------------------------------------------------------------------------- tensors


def header_of(name: str, tensor: Any) -> TensorHeader:
    """What is sent of a tensor in front of its bytes.

    Raises:
        ConfigError: it is not a whole, dense torch tensor or numpy array with memory.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(tensor, torch.Tensor):
        if hasattr(tensor, "full_tensor"):
            raise _unfit(name, "is a DTensor, one rank's part; give whole tensors (tensor.full_tensor())")
        if tensor.is_meta or tensor.layout != torch.strided:
            raise _unfit(name, f"is a {'meta' if tensor.is_meta else 'sparse'} tensor; give dense ones with memory")
        dtype = str(tensor.dtype).removeprefix("torch.")
    elif numpy is not None and isinstance(tensor, numpy.ndarray):
        dtype = tensor.dtype.name
    else:
        raise _unfit(name, f"is a {type(tensor).__name__}, not a torch tensor or a numpy array")
    if dtype not in ITEM_BYTES:
        raise _unfit(name, f"has type {dtype}; known are {', '.join(ITEM_BYTES)}")
    return TensorHeader(name, dtype, tuple(tensor.shape))


def _unfit(name: str, what: str) -> ConfigError:
    return ConfigError(f"{name} {what}")


def chunks_of(pairs: Iterable[tuple[str, Any]]) -> Iterator[TensorChunk]:
    """The tensors in order, copied to the host, in chunks of at most `CHUNK_BYTES`, where a row is not larger."""
    parts: list[TensorPart] = []
    n_bytes = 0
    for name, tensor in pairs:
        header = header_of(name, tensor)
        for place, start, stop in _cuts(header):
            size = _part_bytes(header, place, start, stop)
            if parts and (n_bytes + size > CHUNK_BYTES or len(parts) == CHUNK_PARTS):
                yield TensorChunk(parts=tuple(parts), last=False)
                parts, n_bytes = [], 0
            rows = tensor[place][start:stop] if header.shape else tensor
            parts.append(TensorPart(header=header, place=place, start=start, stop=stop, data=host_bytes(rows)))
            n_bytes += size
            del rows
        del tensor
    yield TensorChunk(parts=tuple(parts), last=True)


def _part_bytes(header: TensorHeader, place: tuple[int, ...], start: int, stop: int) -> int:
    return (stop - start) * math.prod(header.sizes[len(place) + 1 :]) * ITEM_BYTES[header.dtype]


def _cuts(header: TensorHeader, place: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """(place, start, stop) of parts of at most `CHUNK_BYTES`, in C order, cut along the first dimensions."""
    n_rows = header.sizes[len(place)]
    row_bytes = _part_bytes(header, place, 0, 1)
    if n_rows and row_bytes > CHUNK_BYTES and len(place) + 1 < len(header.shape):
        for index in range(n_rows):
            yield from _cuts(header, (*place, index))
        return
    step = max(1, CHUNK_BYTES // max(row_bytes, 1))
    for start in range(0, max(n_rows, 1), step):
        yield place, start, min(start + step, n_rows)


def host_bytes(rows: Any) -> np.ndarray[Any, Any]:
    """A copy of a tensor's or an array's bytes in C order, uint8; its owner may change it from now on."""
    import numpy as np  # noqa: PLC0415  (a tensor is there, so numpy is; the engine alone needs none)

    if isinstance(rows, np.ndarray):
        native = rows.dtype if rows.dtype.isnative else rows.dtype.newbyteorder("=")
        return np.array(rows, dtype=native, order="C").reshape(-1).view(np.uint8)
    import torch  # noqa: PLC0415

    with torch.no_grad():
        host = torch.empty(rows.shape, dtype=rows.dtype, device="cpu").copy_(rows)
        return host.reshape(-1).view(torch.uint8).numpy()
