"""Random rounds of writes, sleeps, faults and drops: a copy that counts as clean is one, and contents come back."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_notebook.memory.base import DeviceError
from omni_notebook.memory.device.shadow import ChunkSums
from tests.memory.fake_cuda import MIB
from tests.memory.fake_ranges import OwnMachine

SIZES = {"weights": (4 * MIB, 2 * MIB), "ballast": (2 * MIB,)}
TAGS = sorted(SIZES)


class Write(NamedTuple):
    """What happens to one tensor: some bytes get a value, or all that was there at first comes back."""

    number: int
    place: int
    n_bytes: int
    value: int | None


def faults(*names):
    """Mostly no fault, else the name of a driver's call and which of them fails."""
    return st.one_of(st.none(), st.none(), st.tuples(st.sampled_from(names), st.integers(1, 3)))


writes = st.lists(
    st.builds(
        Write,
        st.integers(0, 2),
        st.integers(0, 4 * MIB),
        st.sampled_from([1, 9, 3 * MIB]),
        st.none() | st.integers(0, 3),
    ),
    max_size=3,
)


class Round(NamedTuple):
    """Writes, then a sleep and its wake, with what may go wrong at each step."""

    writes: list[Write]
    level: int
    late: bool
    tags: set[str]
    prepare_fault: tuple[str, int] | None
    between: list[Write]  # against the rules
    abort: bool
    commit_fault: tuple[str, int] | None
    drop: bool
    wake_fault: tuple[str, int] | None
    after: str


rounds = st.builds(
    Round,
    writes,
    st.sampled_from([1, 1, 1, 2]),
    st.booleans(),
    st.sampled_from([{"weights"}, {"weights", "ballast"}, {"ballast"}]),
    faults("memcpy", "wait"),
    st.just([]) | writes,
    st.sampled_from([False, False, True]),
    faults("memcpy", "wait", "event"),
    st.sampled_from([False, False, False, True]),
    faults("memcpy", "wait", "create"),
    st.sampled_from(["nothing"] * 4 + ["drop copies", "write ahead", "little room", "much room"]),
)


class Stage:
    """A pool and what its tensors must hold."""

    def __init__(self):
        self.machine = OwnMachine(capacity=32 * MIB)
        self.pool = self.machine.pool()
        self.keys = [(tag, size) for tag, sizes in SIZES.items() for size in sizes]
        self.tensors = [self.pool.empty((size,), torch.uint8, tag, recomputable=False) for tag, size in self.keys]
        for number, tensor in enumerate(self.tensors):
            tensor.random_(0, 256, generator=torch.Generator().manual_seed(number))
        self.first = [tensor.clone() for tensor in self.tensors]
        self.model = [tensor.clone() for tensor in self.tensors]

    def write(self, several):
        for one in several:
            tensor, start = self.tensors[one.number], one.place % len(self.tensors[one.number])
            if one.value is None:
                tensor.copy_(self.first[one.number])
            else:
                tensor[start : start + one.n_bytes] = one.value

    def note(self):
        self.model = [tensor.clone() for tensor in self.tensors]

    def check(self):
        """Contents are right, and what counts as copied is what the copies hold."""
        assert all(map(torch.equal, self.tensors, self.model))
        self.check_copies()

    def check_copies(self):
        copies = self.pool._core.copies
        for segment, sums in copies._sums.items():
            held = torch.frombuffer(copies._buffers[segment].memory.view, dtype=torch.uint8)
            found = ChunkSums(held.device)
            found.add(held)
            assert np.array_equal(found.result().numpy(), sums)
        assert self.machine.libcuda.events == 0

    @contextlib.contextmanager
    def faulty(self, fault):
        """Have a call fail, if there is such a one; the list has the error then."""
        failed = []
        if fault is not None:
            self.machine.fail(*fault)
        try:
            yield failed
        except DeviceError as error:
            failed.append(error)
        self.machine.cumem.faults.clear()

    def go_through(self, one):
        self.write(one.writes)
        self.note()
        if self.falls_asleep(one):
            self.wakes(one)
        self.check()
        self.pool_memory(one.after)

    def falls_asleep(self, one):
        with self.faulty(one.prepare_fault) as failed:
            self.pool.prepare_sleep(one.level, one.tags, late_copy=one.late)
        self.check_copies()
        if failed:
            return False
        self.write(one.between)
        if one.abort:
            self.note()
            self.pool.abort_sleep()
            return False
        with self.faulty(one.commit_fault) as failed:
            self.pool.commit_sleep()
        self.check_copies()
        if failed:
            assert not failed[0].lost
            self.pool.abort_sleep()
            self.accept_either(one)
        return not failed

    def wakes(self, one):
        level = one.level
        if one.drop:
            self.pool.drop_backup()
            level = 2
        with self.faulty(one.wake_fault) as failed:
            self.pool.map_restore()
        if failed:
            self.pool.map_restore()
        self.pool.commit_wake()
        if level == 2:
            for (tag, _), tensor, value in zip(self.keys, self.tensors, self.model, strict=True):
                if tag in one.tags:
                    tensor.copy_(value)
        self.accept_either(one)

    def accept_either(self, one):
        """What was written between the steps of a sleep is there or is not; of all else nothing has changed."""
        for number in {write.number for write in one.between}:
            self.model[number] = self.tensors[number].clone()

    def pool_memory(self, step):
        if step == "drop copies":
            self.pool.drop_copies()
        elif step == "write ahead":
            self.pool.write_ahead()
            assert self.pool.wait_write_ahead(10) or self.machine.host_bytes < self.machine.host_total
        elif step != "nothing":
            self.machine.host_bytes = 20 * MIB if step == "little room" else self.machine.host_total
        self.check_copies()


@settings(max_examples=30, deadline=None)
@given(several=st.lists(rounds, min_size=3, max_size=6))
def test_whatever_happens_to_sleeps_contents_come_back_and_copies_hold_what_their_sums_say(several):
    stage = Stage()
    for one in several:
        stage.go_through(one)
    stage.pool.close()
    assert stage.machine.pinned == {}
    assert stage.machine.gpu.pool_bytes == 0
