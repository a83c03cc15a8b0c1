"""Tensors that do not fit, do not come, or break off: the old weights, or none, and one line that says which."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

import pytest

from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.errors import ConfigError, DeadlineError, NeedsWeightsError, OmniError, StageFailedError, WakeError
from omni_notebook.stages import tensor_source, transitions
from omni_notebook.worker.tensors import TensorChunk, TensorPart
from tests.engine.engine_helpers import collect, fault, golden, slow, until
from tests.engine.weights_helpers import (
    BIG,
    FOLDERS,
    others,
    replaced,
    restored,
    shipped,
    state,
    stream,
    version,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

KIB = 1024


@pytest.fixture
def engine(engine: AsyncOmni) -> Iterator[AsyncOmni]:
    yield engine
    asyncio.run(restored(engine))


@pytest.fixture
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The painter in about a hundred chunks, so that its first tensors are written long before its last one comes."""
    monkeypatch.setattr(tensor_source, "CHUNK_BYTES", 64 * KIB)


def raising(tensors: dict[str, Any], error: BaseException) -> Iterator[tuple[str, Any]]:
    yield from tensors.items()
    raise error


def broken(kind: str) -> dict[str, Any] | Iterator[tuple[str, Any]]:
    """A source that goes wrong at its end; a mapping where it can be one."""
    import torch

    first = next(iter(others()))
    if kind == "raises":
        return raising({first: others()[first], **others()}, RuntimeError("the trainer\nfell over"))
    if kind == "twice":
        return iter([*others().items(), (first, others()[first])])
    changed = {
        "unknown": lambda: replaced("module.extra.weight", torch.zeros(2)),
        "missing": lambda: replaced(BIG, None),
        "shape": lambda: replaced(BIG, others()[BIG][:, 1:]),
        "transposed": lambda: replaced(BIG, others()[BIG].t()),
        "type": lambda: replaced(BIG, others()[BIG].to(torch.int8)),
        "no tensor": lambda: replaced(BIG, others()[BIG].tolist()),
        "no memory": lambda: replaced(BIG, others()[BIG].to("meta")),
        "empty": dict,
    }
    return changed[kind]()


SAYS = {
    "unknown": r"the model has no place for module\.extra\.weight",
    "missing": rf"{BIG}: not given",
    "shape": rf"{BIG} has shape \(\d+, \d+\), the model needs \(\d+, \d+\)",
    "transposed": rf"{BIG} has shape",
    "type": rf"{BIG} is int8, the model's is float32",
    "no tensor": rf"{BIG} is a list, not a torch tensor or a numpy array",
    "no memory": rf"{BIG} is a meta tensor",
    "empty": r"and 78 more: not given",
    "raises": r"the iterator, after \d+ tensors, raised RuntimeError: the trainer fell over",
    "twice": r"was given twice",
}
LATE = [kind for kind in SAYS if kind not in {"empty", "twice", "raises"}]


async def untouched(engine: AsyncOmni, source: Any, says: str) -> None:
    """A load that is refused before anything is written."""
    before = version(engine), await golden(engine)
    with pytest.raises(ConfigError, match=says) as caught:
        await engine.load_weights(1, source, version="new")
    assert "\n" not in str(caught.value)
    assert "nothing changed, stage 1 is AWAKE" in str(caught.value)
    assert (state(engine), version(engine), await golden(engine)) == ("AWAKE", *before)


@pytest.mark.parametrize("kind", [kind for kind in SAYS if kind not in {"raises", "twice"}])
@pytest.mark.usefixtures("many_chunks")
def test_a_mapping_that_does_not_fit_changes_nothing_however_long_it_is(engine: AsyncOmni, kind: str) -> None:
    asyncio.run(untouched(engine, broken(kind), SAYS[kind]))


@pytest.mark.parametrize("kind", SAYS)
def test_an_iterator_that_goes_wrong_before_a_tensor_is_written_changes_nothing(engine: AsyncOmni, kind: str) -> None:
    """The painter fits into one chunk, which is looked at as a whole."""
    source = broken(kind)
    if kind == "raises":
        source = raising(others(), RuntimeError("the trainer\nfell over"))
    asyncio.run(untouched(engine, stream(source) if isinstance(source, dict) else source, SAYS[kind]))


@pytest.mark.parametrize("kind", [*LATE, "raises", "twice"])
@pytest.mark.parametrize("way_out", ["wake", "load", "restart", "sleep and wake"])
@pytest.mark.usefixtures("many_chunks")
def test_an_iterator_that_goes_wrong_half_way_leaves_no_weights_and_every_way_out_leads_to_whole_ones(
    engine: AsyncOmni, kind: str, way_out: str
) -> None:
    source = broken(kind)
    if kind == "raises":
        source = raising(others(), RuntimeError("the trainer\nfell over"))

    async def run() -> None:
        before = version(engine), await golden(engine)
        with pytest.raises(NeedsWeightsError, match=SAYS[kind]) as caught:
            await engine.load_weights(1, stream(source) if isinstance(source, dict) else source)
        assert "\n" not in str(caught.value)
        assert "the stage is NEEDS_WEIGHTS. Call load_weights(1, source), or wake_up([1]) to reload" in str(
            caught.value
        )
        assert state(engine) == "NEEDS_WEIGHTS"
        with pytest.raises(NeedsWeightsError):
            await collect(engine, admission_timeout=0)
        assert (await collect(engine, output_modalities="text"))[-1].text
        if way_out == "load":
            await engine.load_weights(1, stream(shipped()))
        elif way_out == "restart":
            await engine.restart(1)
        else:
            if way_out == "sleep and wake":
                assert all(ack.ok for ack in await engine.sleep([1], level=2))
            assert all(ack.ok for ack in await engine.wake_up([1]))
        assert (state(engine), version(engine), await golden(engine)) == ("AWAKE", *before)

    asyncio.run(run())


@pytest.mark.usefixtures("many_chunks")
def test_after_two_loads_that_no_path_has_a_broken_third_leaves_only_load_weights(engine: AsyncOmni) -> None:
    async def run() -> None:
        await engine.load_weights(1, stream(others()))
        mine = await golden(engine)
        with pytest.raises(NeedsWeightsError, match=r"Call load_weights\(1, source\)$"):
            await engine.load_weights(1, raising(others(), RuntimeError("gone")))
        with pytest.raises(WakeError, match="no checkpoint path"):
            await engine.wake_up([1])
        assert state(engine) == "NEEDS_WEIGHTS"
        with pytest.raises(NeedsWeightsError, match="has no place"):  # nothing was written, and nothing is there
            await engine.load_weights(1, stream({"x": others()[BIG], **others()}))
        await engine.load_weights(1, stream(others()))
        assert (state(engine), await golden(engine)) == ("AWAKE", mine)

    asyncio.run(run())


@pytest.mark.usefixtures("many_chunks")
def test_the_persons_own_error_is_the_cause_and_keeps_no_tensor_of_ours(engine: AsyncOmni) -> None:
    error = RuntimeError("mine")

    with pytest.raises(NeedsWeightsError) as caught:
        asyncio.run(engine.load_weights(1, raising(others(), error)))
    assert isinstance(caught.value.__cause__, ConfigError)
    assert caught.value.__cause__.__cause__ is error
    assert error.__traceback__ is not None
    assert error.__traceback__.tb_frame.f_code.co_name == "raising"
    gc.collect()
    assert not [item for item in gc.get_objects() if type(item) in {TensorChunk, TensorPart}]


# --------------------------------------------------------------------------- time, cancel, shutdown


class Stuck:
    """An iterator that stops giving after some tensors, until it is told to go on."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.waiting = threading.Event()
        self.go_on = threading.Event()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for number, pair in enumerate(others().items()):
            if number == self.after:
                self.waiting.set()
                assert self.go_on.wait(60)
            yield pair


@pytest.fixture
def stuck() -> Iterator[Any]:
    made: list[Stuck] = []

    def make(after: int) -> Stuck:
        made.append(Stuck(after))
        return made[-1]

    yield make
    for one in made:
        one.go_on.set()


@pytest.mark.parametrize("after", [0, 60], ids=["before the first tensor", "half way"])
@pytest.mark.usefixtures("many_chunks")
def test_an_iterator_that_stalls_is_given_up_at_the_deadline(engine: AsyncOmni, stuck: Any, after: int) -> None:
    wanted: type[OmniError] = NeedsWeightsError if after else DeadlineError

    async def run() -> None:
        before = version(engine), await golden(engine)
        started = time.monotonic()
        with pytest.raises(wanted, match=r"the next tensor had not come when the 0\.7 s of this call were over"):
            await engine.load_weights(1, stuck(after), timeout=0.7)
        assert 0.6 < time.monotonic() - started < 3
        assert state(engine) == ("NEEDS_WEIGHTS" if after else "AWAKE")
        assert engine.submit(asyncio.sleep(0, "free")).result(1) == "free"
        await engine.wake_up([1])
        assert (version(engine), await golden(engine)) == before
        await engine.load_weights(1, stream(others()))  # the stuck thread is nobody's any more

    asyncio.run(run())


@pytest.mark.quiet
@pytest.mark.parametrize("after", [0, 60], ids=["before the first tensor", "half way"])
@pytest.mark.usefixtures("many_chunks")
def test_a_cancelled_load_ends_within_a_second_in_a_named_state(engine: AsyncOmni, stuck: Any, after: int) -> None:
    async def run() -> None:
        before = version(engine), await golden(engine)
        source = stuck(after)
        load = asyncio.create_task(engine.load_weights(1, source))
        assert await asyncio.to_thread(source.waiting.wait, 10)
        started = time.monotonic()
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert time.monotonic() - started < 1
        await engine.wake_up([1])  # waits for the stage's lock
        assert (state(engine), version(engine), await golden(engine)) == ("AWAKE", *before)

    asyncio.run(run())


@pytest.mark.usefixtures("many_chunks")
def test_a_load_cancelled_while_it_runs_leaves_whole_weights_or_none(engine: AsyncOmni) -> None:
    async def run() -> None:
        before, threads = (version(engine), await golden(engine)), set(threading.enumerate())
        await engine.load_weights(1, others())
        after = version(engine), await golden(engine)
        await engine.load_weights(1, FOLDERS[1])
        seen = set()
        for number in range(10):
            load = asyncio.create_task(engine.load_weights(1, stream(others())))
            await asyncio.sleep(0.005 * number)
            load.cancel()
            await asyncio.wait({load})
            await until(lambda: not engine._core.stages[1].order_lock.locked())
            seen.add(state(engine))
            if state(engine) == "AWAKE":
                assert (version(engine), await golden(engine)) in (before, after)
            else:
                await engine.wake_up([1])
                assert (version(engine), await golden(engine)) == before
            await engine.load_weights(1, FOLDERS[1])
        assert seen <= {"AWAKE", "NEEDS_WEIGHTS"}
        assert "NEEDS_WEIGHTS" in seen
        await until(lambda: not [t for t in set(threading.enumerate()) - threads if t.name == "omni-tensors"], 5)

    asyncio.run(run())


def test_an_engine_shuts_down_while_an_iterator_is_stuck(stuck: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_source, "CHUNK_BYTES", 64 * KIB)
    engine = AsyncOmni(FOLDERS[1])
    source = stuck(60)
    load = engine.submit(engine.load_weights(0, source))
    assert source.waiting.wait(10)
    started = time.monotonic()
    engine.shutdown()
    assert time.monotonic() - started < 6
    with pytest.raises((OmniError, asyncio.CancelledError, CancelledError)):
        load.result(5)
    source.go_on.set()


# --------------------------------------------------------------------------------------------- ranks


@pytest.mark.parametrize("method", ["load_tensors", "finish_tensors"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_rank_that_fails_while_it_takes_tensors_has_none(engine: AsyncOmni, method: str, after: bool) -> None:
    untouched_too = method == "load_tensors" and not after  # its one chunk never came to it

    async def run() -> None:
        before = version(engine), await golden(engine)
        with (
            fault(engine, 1, method, OSError(5, "the disk failed"), after=after),
            pytest.raises(OSError if untouched_too else NeedsWeightsError, match="the disk failed"),
        ):
            await engine.load_weights(1, stream(others()))
        assert state(engine) == ("AWAKE" if untouched_too else "NEEDS_WEIGHTS")
        await engine.wake_up([1])
        assert (version(engine), await golden(engine)) == before

    asyncio.run(run())


def test_a_rank_that_fails_to_look_at_the_tensors_keeps_its_weights(engine: AsyncOmni) -> None:
    async def run() -> None:
        before = version(engine), await golden(engine)
        with fault(engine, 1, "prepare_tensors", OSError(5, "no")), pytest.raises(OSError, match="no"):
            await engine.load_weights(1, others())
        assert (state(engine), version(engine), await golden(engine)) == ("AWAKE", *before)

    asyncio.run(run())


def test_a_rank_that_hangs_while_it_takes_tensors_fails_its_stage(
    engine: AsyncOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transitions, "GRACE_S", 0.2)

    async def run() -> None:
        before = await golden(engine)
        says = r"did not answer 'load_tensors' .*; stage 1 has FAILED, call restart\(1\)$"
        with slow(engine, 1, 1.5, "load_tensors"), pytest.raises(DeadlineError, match=says):
            await engine.load_weights(1, stream(others()), timeout=0.3)
        assert state(engine) == "FAILED"
        await engine.restart(1)
        assert (state(engine), await golden(engine)) == ("AWAKE", before)

    asyncio.run(run())


def test_a_rank_that_dies_while_the_iterator_is_stuck_ends_the_load_at_once(stuck: Any) -> None:
    async def run(engine: AsyncOmni) -> None:
        source = stuck(60)
        load = asyncio.create_task(engine.load_weights(0, source))
        assert await asyncio.to_thread(source.waiting.wait, 10)
        started = time.monotonic()
        os.kill(int(engine.status().stages[0].ranks[0].pid or 0), signal.SIGKILL)
        with pytest.raises(StageFailedError, match=r"killed by SIGKILL.*restart\(0\)"):
            await load
        assert time.monotonic() - started < 2
        await engine.restart(0)
        assert state(engine, 0) == "AWAKE"

    with AsyncOmni(FOLDERS[1], executor="mp") as engine:
        asyncio.run(run(engine))
