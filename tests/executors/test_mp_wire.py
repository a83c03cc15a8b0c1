"""Frames, types, errors and processors: the parts of the mp executor by themselves."""

from __future__ import annotations

import inspect
import pickle
import socket
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import numpy as np
import pytest

from omni_notebook import errors
from omni_notebook.executors import make_executor
from omni_notebook.executors.mp.executor import MpExecutor
from omni_notebook.executors.mp.messages import Order, ToChild, payload
from omni_notebook.executors.mp.placement import THREAD_VARIABLES, environment, places, split
from omni_notebook.executors.mp.wire import INLINE_BYTES, Receiver, pack
from omni_notebook.memory.libc import HEAPS_VARIABLE
from omni_notebook.protocol import OmniACK, SleepTask, WakeTask
from omni_notebook.worker.batches import (
    ArBatch,
    DiffusionBatch,
    Executed,
    ImageAnswer,
    ImageCondition,
    ImageStep,
    SequenceAnswer,
    SequenceStep,
)
from omni_notebook.worker.faults import describe, rebuild
from omni_notebook.worker.methods import METHODS, signature
from omni_notebook.worker.reports import LoadReport, WakeOutlook
from omni_notebook.worker.worker import Worker
from tests.executors.executor_helpers import fds, make_specs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.executors.conftest import Run

HIDDEN = np.arange(12, dtype="float32").reshape(3, 4)
STEP = SequenceStep(
    slot=1, token_ids=(5, 6), start=0, prompt_len=2, seed=3, temperature=0.0, top_p=1.0, top_k=0, want_hidden=True
)
BATCHES = [
    ArBatch((STEP,)),
    DiffusionBatch(
        batch_id="b",
        images=(
            ImageStep(key=1, seed=2**62, condition=ImageCondition(plan_ids=(1, 2), hidden=HIDDEN)),
            ImageStep(key=2, seed=0, condition=None),
        ),
        num_inference_steps=4,
        guidance_scale=2.0,
    ),
]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Receiver]]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield near, Receiver(far)
    near.close()
    far.close()


def same(left: object, right: object) -> bool:
    """Equal, arrays among it by content."""
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, msgspec.Struct):
        return type(left) is type(right) and all(
            same(getattr(left, f), getattr(right, f)) for f in left.__struct_fields__
        )
    if isinstance(left, tuple | list):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return left == right


@pytest.mark.parametrize("batch", BATCHES, ids=["ar", "diffusion"])
def test_a_batch_arrives_as_itself(pair: tuple[socket.socket, Receiver], batch: object) -> None:
    pack(Order(1, "execute", payload((batch,)))).send(pair[0])
    frame = pair[1].receive()
    order = frame.decode(ToChild)
    assert (type(order), order.id, order.method) == (Order, 1, "execute")
    (arrived,) = frame.decode(signature("execute").args, order.args)
    assert same(arrived, batch)


@pytest.mark.parametrize("n_bytes", [0, 1, 63, INLINE_BYTES - 300, INLINE_BYTES, INLINE_BYTES + 1, 5_000_001])
def test_frames_of_any_size_arrive_and_leave_no_file(pair: tuple[socket.socket, Receiver], n_bytes: int) -> None:
    arrays = [np.arange(n_bytes, dtype="uint8"), np.arange(7.0), np.arange(n_bytes // 2, dtype="uint8")]
    before = fds()
    pack(["x" * 10, arrays]).send(pair[0])
    text, arrived = pair[1].receive().decode(list)
    assert text == "x" * 10
    assert same(arrived, arrays)
    arrived[0][:] = 0  # a private copy: writing is allowed and nobody else sees it
    assert fds() == before


def test_one_packet_may_go_to_many(pair: tuple[socket.socket, Receiver]) -> None:
    packet = pack(np.ones(100_000))
    for _ in range(3):
        packet.send(pair[0])
    frames = [pair[1].receive() for _ in range(3)]
    first = frames[0].decode(Any)
    first[:] = 5
    assert frames[1].decode(Any).sum() == 100_000


def test_the_end_of_a_connection_is_no_frame(pair: tuple[socket.socket, Receiver]) -> None:
    pair[0].close()
    assert pair[1].receive() is None


@pytest.mark.parametrize(
    "value", [object(), np.array([object()]), {1: {2}, 3: open}], ids=["object", "dtype", "function"]
)
def test_what_has_no_form_is_refused(value: object) -> None:
    with pytest.raises(errors.ArgumentError, match="between processes"):
        pack(value)


def test_every_order_of_a_worker_has_its_types() -> None:
    public = {name for name, _ in inspect.getmembers(Worker, inspect.isfunction) if name[0] != "_"}
    assert set(METHODS) == public - {"shutdown", "memory"}
    for name, (args, _answer) in METHODS.items():
        assert len(get_args(args)) == len(inspect.signature(getattr(Worker, name)).parameters) - 1


def test_answers_of_a_real_process_come_back_as_themselves(mp: Run) -> None:
    async def test() -> None:
        executor = MpExecutor(make_specs(1), worker="omni_notebook.executors.simulated_worker:SimulatedWorker")
        mp.made.append(executor)

        async def ask(method: str, *args: object) -> object:
            return (await executor.call(method, *args))[0].unwrap()

        assert isinstance(await ask("load"), LoadReport)
        assert await ask("prepare_sleep", SleepTask(task_id="t", level=2)) is None
        slept = await ask("commit_sleep", "t")
        assert isinstance(slept, OmniACK)
        assert slept.metadata["tags"]["weights"]["freed"] == slept.freed_bytes > 0
        assert isinstance(await ask("prepare_wake", WakeTask(task_id="w")), WakeOutlook)
        assert await ask("weights_valid") is True

    mp(test)


def test_answers_with_arrays_have_their_types(pair: tuple[socket.socket, Receiver]) -> None:
    answers = [SequenceAnswer(token_id=1, hidden=HIDDEN), SequenceAnswer(token_id=2, hidden=None)]
    executed = Executed(step_versions=(("v1", 3),))
    images = [ImageAnswer(pixels=np.zeros((64, 64, 3), "uint8"), png=b"png")]
    for method, value in (("execute", answers), ("execute", executed), ("collect", images)):
        pack(value).send(pair[0])
        assert same(pair[1].receive().decode(signature(method).answer), value)


# ---------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("name", [n for n, v in vars(errors).items() if isinstance(v, type) and n.endswith("Error")])
def test_each_of_our_errors_crosses_a_process_border_with_its_state(name: str) -> None:
    kind = getattr(errors, name)
    known = {"needed_bytes": 1, "free_bytes": 2, "stage_id": 3, "rank": 4, "running": 5, "queued": 6, "in_transit": 7}
    known |= {"acks": [], "type_name": "X", "log_lines": ["a"]}
    code = getattr(kind.__init__, "__code__", None)  # those with no constructor of their own take a message only
    wanted = [p for p in (code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()) if p in known]
    error = kind("what happened", **{p: known[p] for p in wanted})
    for back in (rebuild(describe(error)), pickle.loads(pickle.dumps(error))):
        assert (type(back), str(back)) == (kind, "what happened")
        assert {p: getattr(back, p) for p in wanted} == {p: known[p] for p in wanted}


def test_an_error_whose_message_can_not_be_had_still_arrives() -> None:
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    back = rebuild(describe(BrokenError()))
    assert isinstance(back, errors.RemoteWorkerError)
    assert "can not be had" in str(back)


# ------------------------------------------------------------------------------------------ processors


def test_processors_are_split_evenly_and_threads_follow() -> None:
    cpus = list(range(10))
    shares = [split(cpus, n, 4) for n in range(4)]
    assert sorted(cpu for share in shares for cpu in share.cpus) == cpus
    assert {share.threads for share in shares} == {2, 3}
    assert all(len(share.cpus) == share.threads for share in shares)
    assert split([0, 1], 5, 64) == ((), 1)


def test_replicas_of_a_stage_share_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(8)))
    specs = make_specs(2, num_replicas=2)
    second = [msgspec.structs.replace(s, where=msgspec.structs.replace(s.where, replica=1)) for s in specs]
    assert [place.cpus for place in (*places(specs), *places(second))] == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    place = split(range(4), 0, 1)
    for name in (*THREAD_VARIABLES, HEAPS_VARIABLE, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    assert environment(place) == {"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "PASSIVE", "MALLOC_ARENA_MAX": "2"}
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("MKL_NUM_THREADS", "16")
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "7")
    assert environment(place) == {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "4"}


def test_ray_is_refused_by_name() -> None:
    fake = type("Config", (), {"runtime_name": "torch", "executor_name": "ray"})()
    with pytest.raises(errors.UnsupportedError, match="ray"):
        make_executor(fake)
