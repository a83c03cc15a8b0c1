"""Named tensors in chunks: bounded memory, exact bytes, and a thread that holds nobody."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from omni_notebook.errors import ConfigError
from omni_notebook.models.places import Places
from omni_notebook.stages import tensor_source
from omni_notebook.stages.tensor_source import Answer, TensorSource, chunks_of, header_of
from omni_notebook.worker.intake import Intake
from omni_notebook.worker.tensors import ITEM_BYTES, TensorChunk, TensorPart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KIB = 1024


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_source, "CHUNK_BYTES", 64 * KIB)


class Box(nn.Module):
    """A module with just these tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor], parts: dict[str, tuple[slice, ...]] | None = None) -> None:
        super().__init__()
        self._parts = parts or {}
        self._wholes = {name: tuple(tensors[name].shape) for name in self._parts}
        for name, tensor in tensors.items():
            self.register_buffer(name, torch.full_like(tensor[self._parts.get(name, ())], 77))

    def checkpoint_slices(self) -> dict[str, tuple[slice, ...]]:
        return self._parts

    def checkpoint_wholes(self) -> dict[str, tuple[int, ...]]:
        return self._wholes


def taken(module: nn.Module, chunks: Any) -> dict[str, torch.Tensor]:
    """What a module holds once it has taken the chunks."""
    intake = Intake(Places(module))
    for chunk in chunks:
        intake.check(chunk)
        intake.write(chunk)
    return module.state_dict()


def n_bytes(chunk: TensorChunk) -> int:
    return sum(len(part.data) for part in chunk.parts)


@pytest.fixture
def sources() -> Iterator[Callable[[Any], TensorSource]]:
    """Makes sources, and closes them, as the engine does."""
    with contextlib.ExitStack() as made:

        def make(given: Any) -> TensorSource:
            source = TensorSource(given)
            made.callback(source.close)
            return source

        yield make


def asked(source: TensorSource, what: str = "chunk") -> Answer:
    async def run() -> Answer:
        return await asyncio.wait_for(getattr(source, what)(), 10)

    return asyncio.run(run())


@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (3, 0, 4), (0, 10**6), (100_000,), (7, 5000), (1, 3, 40_000), (2, 3, 5, 3000)], ids=str
)
@pytest.mark.usefixtures("small_chunks")
def test_a_tensor_of_any_shape_is_cut_and_put_together_again(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    given = {"before": torch.randn(3), "it": torch.randn(shape), "after": torch.randn(2, 2)}
    chunks = list(chunks_of(given.items()))
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert max(n_bytes(chunk) for chunk in chunks) <= 64 * KIB
    held = taken(Box(given), chunks)
    assert held.keys() == given.keys()
    assert all(torch.equal(held[name], given[name]) for name in given)


@pytest.mark.parametrize(
    "part",
    [
        (slice(2, 5),),
        (slice(None), slice(10, 30)),
        (slice(0, 1), slice(1, 2), slice(7, 3000)),
        (slice(6, 7), slice(0, 3), slice(None), slice(0, 3)),
    ],
    ids=str,
)
@pytest.mark.usefixtures("small_chunks")
def test_a_rank_keeps_its_slice_of_tensors_that_come_in_parts(part: tuple[slice, ...]) -> None:
    given = {"it": torch.randn(7, 30, 3000 if len(part) < 4 else 300, 4)}
    held = taken(Box(given, {"it": part}), chunks_of(given.items()))
    assert torch.equal(held["it"], given["it"][part])


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_every_type_arrives_bit_by_bit(dtype: str) -> None:
    kind = getattr(torch, dtype)
    given = (torch.arange(-30, 30) if kind.is_floating_point else torch.arange(60)).to(kind)
    held = taken(Box({"it": given}), chunks_of([("it", given)]))
    assert held["it"].dtype == kind
    assert torch.equal(held["it"].view(torch.uint8), given.view(torch.uint8))


def test_types_are_converted_on_the_rank() -> None:
    given = torch.randn(5, 4).to(torch.bfloat16)
    held = taken(Box({"it": torch.zeros(5, 4)}), chunks_of([("it", given)]))
    assert torch.equal(held["it"], given.float())


@pytest.mark.parametrize(
    "make",
    [
        lambda array: array,
        lambda array: array.astype(">f4"),
        np.asfortranarray,
        lambda array: np.repeat(array, 2, axis=1)[:, ::2],
        lambda array: torch.from_numpy(array).t().contiguous().t(),
        lambda array: nn.Parameter(torch.from_numpy(array)),
        lambda array: torch.from_numpy(np.repeat(array, 2, axis=0))[::2],
    ],
    ids=["C order", "big endian", "Fortran order", "strided", "transposed", "parameter", "strided tensor"],
)
def test_arrays_and_tensors_of_any_layout(make: Any) -> None:
    array = np.random.default_rng(2).standard_normal((6, 9)).astype(np.float32)
    held = taken(Box({"it": torch.zeros(6, 9)}), chunks_of([("it", make(array))]))
    assert np.array_equal(held["it"].numpy(), array)


@pytest.mark.usefixtures("small_chunks")
def test_an_iterator_that_fills_one_buffer_again_and_again_is_read_before_it_goes_on() -> None:
    buffer = torch.zeros(10, 10)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(50):
            buffer.fill_(number)
            yield f"t{number}", buffer

    module = Box({f"t{number}": buffer for number in range(50)})
    held = taken(module, list(chunks_of(stream())))
    assert [held[f"t{number}"].unique().tolist() for number in range(50)] == [[number] for number in range(50)]


def living(references: list[weakref.ref[Any]]) -> int:
    return sum(reference() is not None for reference in references)


@pytest.mark.usefixtures("small_chunks")
def test_one_tensor_of_an_iterator_and_one_chunk_are_held_at_a_time() -> None:
    tensors: list[weakref.ref[Any]] = []
    arrays: list[weakref.ref[Any]] = []
    most = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(60):
            tensor = torch.full((40, 100), float(number))  # 16 000 bytes: four a chunk
            tensors.append(weakref.ref(tensor))
            most.append(living(tensors))
            yield f"t{number}", tensor
            del tensor

    n_chunks = 0
    for chunk in chunks_of(tensor_source._pairs(stream(), threading.Event())):
        n_chunks += 1
        arrays += [weakref.ref(part.data) for part in chunk.parts]
        del chunk
        assert living(arrays) <= 4
    assert n_chunks == 15
    assert most == [1] * 60
    assert living(tensors) == 0


@pytest.mark.usefixtures("small_chunks")
def test_nobody_reads_ahead_further_than_was_asked(sources: Callable[[Any], TensorSource]) -> None:
    given: list[int] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(60):
            given.append(number)
            yield f"t{number}", torch.zeros(40, 100)

    source = sources(stream())
    chunk = asked(source).value
    assert len(chunk.parts) == 4
    time.sleep(0.1)
    assert given == list(range(5))  # the fifth told that the chunk was full
    asked(source)
    assert given == list(range(9))


def test_what_can_be_gone_through_twice_is_known_beforehand() -> None:
    tensors = {"a": torch.zeros(2, 3), "b": np.zeros((), np.float16)}
    for given in (tensors, tensors.items(), list(tensors.items()), tuple(tensors.items())):
        source = TensorSource(given)
        assert source.twice
        assert [(h.name, h.dtype, h.shape) for h in asked(source, "headers").value] == [
            ("a", "float32", (2, 3)),
            ("b", "float16", ()),
        ]
        assert len(asked(source).value.parts) == 2
        source.close()
    assert not TensorSource(iter(tensors.items())).twice
    assert not TensorSource(nn.Linear(2, 2).named_parameters()).twice


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        ([1.0], "it is a list, not a torch tensor"),
        (np.float32(1), "it is a float32, not a torch tensor"),
        (None, "it is a NoneType"),
        (torch.zeros(2, device="meta"), "meta tensor; give dense ones"),
        (torch.eye(3).to_sparse(), "sparse tensor; give dense ones"),
        (torch.zeros(2, dtype=torch.complex64), "has type complex64"),
        (np.array(["a"]), "has type str"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_whole_dense_tensor_is_named(tensor: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        header_of("it", tensor)


def test_one_ranks_part_of_a_distributed_tensor_is_refused() -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        tensor = distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (1,)))
        with pytest.raises(ConfigError, match=r"it is a DTensor, .*full_tensor\(\)"):
            header_of("it", tensor)
        assert header_of("it", tensor.full_tensor()).shape == (4,)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("item", ["weight", ("weight",), (1, torch.zeros(1)), 3], ids=str)
def test_an_item_that_is_no_pair_is_named(item: Any, sources: Callable[[Any], TensorSource]) -> None:
    answer = asked(sources(iter([("a", torch.zeros(1)), item])))
    assert "item 2 is a" in str(answer.error)


@pytest.mark.parametrize("error", [RuntimeError("out\nof luck"), KeyboardInterrupt(), SystemExit(3), StopIteration()])
def test_whatever_the_iterator_raises_is_the_answer_and_its_cause(
    error: BaseException, sources: Callable[[Any], TensorSource]
) -> None:
    class Stream:
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield "a", torch.zeros(1)
            raise error

    answer = asked(sources(Stream()))
    assert isinstance(answer.error, ConfigError)
    assert "\n" not in str(answer.error)
    assert "the iterator, after 1 tensors, raised" in str(answer.error)
    assert answer.error.__cause__ is error or isinstance(error, StopIteration)


def test_an_error_keeps_none_of_the_tensors() -> None:
    tensors: list[weakref.ref[Any]] = []

    def stream() -> Iterator[tuple[str, Any]]:
        for number in range(3):
            tensor = torch.zeros(40, 100)
            tensors.append(weakref.ref(tensor))
            yield f"t{number}", tensor
            del tensor
        yield "last", "no tensor"

    source = TensorSource(stream())
    answer = asked(source)
    source.close()
    assert "last is a str" in str(answer.error)
    assert answer.error is not None
    assert answer.error.__traceback__ is not None
    gc.collect()
    assert living(tensors) == 0
    assert not [item for item in gc.get_objects() if type(item) is TensorPart]


def test_endless_small_tensors_come_in_chunks_and_end_with_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    def endless() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal count
        while True:
            count += 1
            yield f"t{count}", torch.empty(0)

    source = TensorSource(endless())
    assert len(asked(source).value.parts) == tensor_source.CHUNK_PARTS
    monkeypatch.setattr(tensor_source, "CHUNK_PARTS", 10**12)  # the next chunk is never full

    async def run() -> None:
        before = count
        source.chunk()
        while count < before + 100:  # noqa: ASYNC110 (the thread signals nothing)
            await asyncio.sleep(0.002)
        source.close()

    asyncio.run(asyncio.wait_for(run(), 20))
    assert source._thread is not None
    source._thread.join(10)
    assert not source._thread.is_alive()


def test_a_thread_that_is_stuck_lets_go_once_it_can() -> None:
    go_on, entered = threading.Event(), threading.Event()

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        entered.set()
        assert go_on.wait(20)
        yield "a", torch.zeros(1)

    async def run() -> threading.Thread:
        source = TensorSource(stream())
        coming = source.chunk()
        await asyncio.to_thread(entered.wait, 10)
        assert not coming.done()
        source.close()
        assert source._thread is not None
        return source._thread

    thread = asyncio.run(run())
    assert thread.daemon
    assert thread.is_alive()
    go_on.set()  # its loop has ended meanwhile
    thread.join(10)
    assert not thread.is_alive()
