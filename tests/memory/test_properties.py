"""Random orders and writes against a model of bytes."""

from __future__ import annotations

import ctypes
import tempfile

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omni_notebook.memory.cpu import CpuPool
from tests.memory.pools import MIB

SIZES = {"weights": 5 * MIB + 64, "ballast": 2 * MIB, "kv_cache": 3 * MIB}
SPANS = {"weights": 6 * MIB, "ballast": 2 * MIB, "kv_cache": 4 * MIB}
RECOMPUTABLE = {"kv_cache"}
tag_sets = st.sets(st.sampled_from(sorted(SIZES)), min_size=1)


class PoolMachine(RuleBasedStateMachine):
    """`model`: the bytes each tag must have; `state`: awake, prepared, asleep, mapped or restored."""

    @initialize(tracking=st.sampled_from(["auto", "checksum"]), seed=st.integers(0, 99))
    def start(self, tracking, seed):
        self.folder = tempfile.TemporaryDirectory()
        self.pool = CpuPool(self.folder.name, tracking=tracking)
        self.tensors, self.model, self.state, self.level, self.before = {}, {}, {}, {}, {}
        for tag, size in SIZES.items():
            self.tensors[tag] = self.pool.empty((size,), torch.uint8, tag, recomputable=tag in RECOMPUTABLE)
            self.model[tag] = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
            self.tensors[tag].numpy()[:] = self.model[tag]
            self.state[tag] = "awake"
        self.kept = slice(2 * MIB - 5, 2 * MIB + 90)
        self.pool.keep("weights", [self.tensors["weights"][self.kept]])
        self.addresses = {tag: tensor.data_ptr() for tag, tensor in self.tensors.items()}

    def having(self, *states):
        return sorted(tag for tag, state in self.state.items() if state in states)

    @precondition(lambda self: self.having("awake", "restored"))
    @rule(data=st.data(), how=st.sampled_from(["data", "numpy", "pointer"]), value=st.integers(0, 255))
    def write(self, data, how, value):
        tag = data.draw(st.sampled_from(self.having("awake", "restored")))
        start = data.draw(st.integers(0, SIZES[tag] - 1))
        end = min(SIZES[tag], start + data.draw(st.sampled_from([1, 4096, 3 * MIB])))
        tensor = self.tensors[tag]
        if how == "data":
            tensor.data[start:end] = value
        elif how == "numpy":
            tensor.numpy()[start:end] = value
        else:
            ctypes.memset(tensor.data_ptr() + start, value, end - start)
        self.model[tag][start:end] = value

    @precondition(lambda self: self.having("awake") == sorted(SIZES))
    @rule(wait=st.booleans())
    def write_ahead(self, wait):
        self.pool.write_ahead()
        if wait:
            assert self.pool.wait_write_ahead(10)

    @precondition(lambda self: self.having("awake") and not self.having("prepared", "mapped", "restored"))
    @rule(level=st.sampled_from([1, 2]), names=tag_sets)
    def prepare(self, level, names):
        names = sorted(names & set(self.having("awake")))
        if names:
            report = self.pool.prepare_sleep(level, names)
            assert sorted(report.backup) == names
            self.state.update(dict.fromkeys(names, "prepared"))
            self.level.update(dict.fromkeys(names, level))

    @precondition(lambda self: self.having("prepared"))
    @rule()
    def abort_sleep(self):
        self.pool.abort_sleep()
        self.state.update(dict.fromkeys(self.having("prepared"), "awake"))

    @precondition(lambda self: self.having("prepared"))
    @rule()
    def commit_sleep(self):
        names = self.having("prepared")
        assert self.pool.commit_sleep().freed == {tag: SPANS[tag] for tag in names}
        for tag in names:
            self.state[tag] = "asleep"
            self._lose(tag)

    def _lose(self, tag):
        """What a sleep at the tag's level forgets."""
        if tag in RECOMPUTABLE or self.level[tag] == 2:
            kept = self.model[tag][self.kept].copy()
            self.model[tag][:] = 0
            if tag == "weights":
                self.model[tag][self.kept] = kept

    @precondition(lambda self: self.having("asleep"))
    @rule(names=tag_sets)
    def drop_backup(self, names):
        names = sorted(names & set(self.having("asleep")))
        if names:
            self.pool.drop_backup(names)
            self.level.update(dict.fromkeys(names, 2))
            for tag in names:
                self._lose(tag)

    @precondition(lambda self: self.having("asleep"))
    @rule(names=tag_sets, fused=st.booleans())
    def wake(self, names, fused):
        names = sorted(names & set(self.having("asleep")))
        if not names:
            return
        if fused:
            mapped, restored = self.pool.map_restore(names)
        else:
            mapped = self.pool.map(names)
            restored = self.pool.restore(names)
        assert mapped.mapped_bytes == sum(SPANS[tag] for tag in names)
        lost = [tag for tag in names if self.level[tag] == 2 and tag not in RECOMPUTABLE]
        assert sorted(restored.needs_reload) == lost
        self.state.update(dict.fromkeys(names, "restored"))
        self.before.update({tag: self.model[tag].copy() for tag in names})  # later writes go with an aborted wake

    @precondition(lambda self: self.having("restored"))
    @rule()
    def abort_wake(self):
        self.pool.abort_wake()
        for tag in self.having("restored"):
            self.state[tag] = "asleep"
            self.model[tag] = self.before[tag]

    @precondition(lambda self: self.having("restored"))
    @rule()
    def commit_wake(self):
        self.pool.commit_wake()
        self.state.update(dict.fromkeys(self.having("restored"), "awake"))

    @invariant()
    def memory_is_what_the_model_says(self):
        if not hasattr(self, "pool"):
            return
        for tag, measured in self.pool.memory().items():
            present = self.state[tag] != "asleep"
            assert measured.resident_bytes == (SPANS[tag] if present else 0)
            if present:
                assert np.array_equal(self.tensors[tag].numpy(), self.model[tag]), tag
        assert {tag: tensor.data_ptr() for tag, tensor in self.tensors.items()} == self.addresses

    def teardown(self):
        if hasattr(self, "pool"):
            self.pool.close()
            assert self.pool.host_backup_bytes() == 0
            self.folder.cleanup()


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestPool = PoolMachine.TestCase
