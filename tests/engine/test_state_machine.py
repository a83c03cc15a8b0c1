"""Random orders and faults against one real engine, whose painter has two ranks in processes of their own.

After each: a named state, memory that agrees with it as another process sees it, whole answers, gates that open exactly
when they should, and the pictures from before. `OMNI_TEST_EXAMPLES=50` makes as many runs, of other orders each time.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from omni_notebook.config import DEMO_FOLDER
from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.errors import NeedsWeightsError, OmniError, PauseError, SleepError, WakeError
from omni_notebook.protocol import MIB, MemoryState
from omni_notebook.stages import replica, transitions
from omni_notebook.stages.state_table import Action, Column, Order, column, decide
from tests.engine import faults
from tests.engine.engine_helpers import collect, golden, rank_fault, until
from tests.engine.faults import KILLED, LATE, RAISES, STAGE, STOPPED
from tests.engine.faulty_worker import PATIENCE

if TYPE_CHECKING:
    from pathlib import Path

EXAMPLES, STEPS = 6, 45
DEADLY = 2
"""Faults an example that end a rank: each costs a restart, seconds."""
RANKS = [(0, 0), (0, 1)]
SHIPPED = DEMO_FOLDER / "dit"

steps = st.sampled_from(["prepare", "commit"])
harmless = st.none() | st.none() | st.tuples(steps, st.sampled_from([RAISES, LATE]))
deadly = st.none() | st.none() | st.none() | st.tuples(steps, st.sampled_from([KILLED, STOPPED]))
places = st.sampled_from(RANKS)


class Painter(RuleBasedStateMachine):
    """Stage 1 as a person, and chance, may treat it."""

    engine: AsyncOmni
    folders: dict[str, Path]
    tensors: dict[str, dict[str, Any]]
    pictures: dict[str, Any]
    done: list[str]

    @initialize()
    def begin(self) -> None:
        """All awake with the shipped weights."""
        self.weights = "shipped"
        self.reproducible = True
        self.deaths = 0
        self.fresh = True
        self.done.append("begin")  # what may come first must not depend on the run before

    # ------------------------------------------------------------------------------------ shorts

    @property
    def stage(self) -> Any:
        return self.engine.status().stages[STAGE]

    @property
    def at(self) -> Column:
        return column(self.stage.state, self.stage.level)

    def decide(self, order: Order) -> Action:
        if self.stage.pause_state == "PAUSE_FAILED" and order not in {Order.WAKE, Order.WAKE_NO_RELOAD}:
            return Action.REFUSE
        return decide(order, self.stage.state, self.stage.level)

    def run(self, name: str, coroutine: Any) -> Any:
        self.done.append(name)
        self.fresh = True
        return asyncio.run(coroutine)

    def refused(self, name: str, coroutine: Any) -> None:
        before = self.at
        with pytest.raises((OmniError, PauseError)) as caught:
            self.run(name, coroutine)
        assert not isinstance(caught.value, SleepError | WakeError)
        assert "Nothing changed" in str(caught.value)
        assert self.at == before

    @property
    def lost(self) -> bool:
        """Whether there are no weights, and no path to any."""
        return self.at == Column.NEEDS_WEIGHTS and not self.reproducible

    def order(self, name: str, call: Any, chance: Any, place: tuple[int, int]) -> None:
        """A sleep or a wake that is carried out, with a fault in it or not."""
        step, what = chance or ("prepare", None)
        before = self.at
        verb = name.split("(", maxsplit=1)[0]

        async def go() -> list[Any]:
            try:
                if what is None:
                    return await call(timeout=None)
                with rank_fault(self.engine, STAGE, place, f"{step}_{verb}", **what):
                    return await call(timeout=0.7 if what is STOPPED else None)
            except (SleepError, WakeError) as error:
                return error.acks

        acks = self.run(f"{name} {chance and (step, what)}", go())
        assert [(ack.metadata["replica"], ack.rank) for ack in acks] == RANKS
        assert len({ack.task_id for ack in acks}) == 1
        assert len({ack.status for ack in acks}) == 1, "one rank says it moved, another that it did not"
        if what is None:
            assert all(ack.ok for ack in acks), acks
        elif not acks[0].ok:
            deadly_one = "signal" in what
            assert self.at == (Column.FAILED if deadly_one else before)
            assert all(f"rank {place[1]}" in str(ack.error_msg) for ack in acks)
            self.deaths += deadly_one

    # ------------------------------------------------------------------------------------- rules

    @rule(
        level=st.sampled_from([1, 2]), mode=st.sampled_from([None, "keep", "wait", "abort"]), chance=harmless, at=places
    )
    def sleep(self, level: int, mode: Any, chance: Any, at: tuple[int, int]) -> None:
        self._sleep(level, mode, chance, at)

    def _sleep(self, level: int, mode: Any, chance: Any, at: tuple[int, int]) -> None:
        def call(timeout: float | None) -> Any:
            return self.engine.sleep([STAGE], level=level, mode=mode, timeout=timeout)

        if self.decide(Order.SLEEP_1 if level == 1 else Order.SLEEP_2) == Action.REFUSE:
            self.refused(f"sleep({level}) refused", call(None))
            return
        self.order(f"sleep({level}, {mode})", call, chance, at)
        if chance is None:
            assert self.at in {Column.ASLEEP_1, Column.ASLEEP_2}
            assert self.stage.level >= level

    @rule(
        tags=st.sampled_from([None, None, ["weights"], ["ballast"]]), reload=st.booleans(), chance=harmless, at=places
    )
    def wake(self, tags: Any, reload: bool, chance: Any, at: tuple[int, int]) -> None:
        self._wake(tags, reload, chance, at)

    def _wake(self, tags: Any, reload: bool, chance: Any, at: tuple[int, int]) -> None:
        def call(timeout: float | None) -> Any:
            return self.engine.wake_up([STAGE], tags=tags, reload=reload, timeout=timeout)

        if self.decide(Order.WAKE if reload else Order.WAKE_NO_RELOAD) == Action.REFUSE:
            self.refused("wake refused", call(None))
            return
        if self.lost and reload:
            with pytest.raises(WakeError, match="call load_weights"):
                self.run("wake without a path", call(None))
            assert self.lost
            return
        self.order(f"wake({tags}, {reload})", call, chance, at)
        if chance is None and tags is None and reload:
            assert self.at == Column.AWAKE or self.lost

    @precondition(lambda self: self.deaths < DEADLY)
    @rule(level=st.sampled_from([1, 2]), chance=deadly, at=places)
    def sleep_with_a_death(self, level: int, chance: Any, at: tuple[int, int]) -> None:
        self._sleep(level, None, chance, at)

    @precondition(lambda self: self.deaths < DEADLY)
    @rule(chance=deadly, at=places)
    def wake_with_a_death(self, chance: Any, at: tuple[int, int]) -> None:
        self._wake(None, True, chance, at)

    @precondition(lambda self: self.deaths < DEADLY and self.at != Column.FAILED)
    @rule(at=places, really=st.integers(0, 3))
    def kill(self, at: tuple[int, int], really: int) -> None:
        if really:
            return
        self.deaths += 1
        pid = self.stage.ranks[at[1]].pid
        os.kill(pid, signal.SIGKILL)
        self.run("kill", until(lambda: self.at == Column.FAILED, 10))
        assert f"rank {at[1]} of stage 1 was killed" in self.stage.last_error

    @rule(mode=st.sampled_from(["keep", "wait", "abort"]))
    def pause(self, mode: str) -> None:
        failed = self.at == Column.FAILED
        try:
            self.run(f"pause({mode})", self.engine.pause_generation(mode, timeout=10))
        except OmniError:
            assert failed
            assert self.stage.pause_state == "PAUSE_FAILED"
        else:
            assert self.stage.pause_state == "PAUSED"

    @rule()
    def resume(self) -> None:
        self.run("resume", self.engine.resume_generation())
        assert not self.engine.status().paused

    @rule(
        name=st.sampled_from(["shipped", "other"]),
        path=st.booleans(),
        chance=st.none() | st.sampled_from([RAISES, LATE]),
        at=places,
    )
    def load_weights(self, name: str, path: bool, chance: Any, at: tuple[int, int]) -> None:
        source = self.folders[name] if path else iter(self.tensors[name].items())
        call = self.engine.load_weights(STAGE, source)
        method = "load_weights" if path else "load_tensors"
        if self.decide(Order.LOAD_WEIGHTS) == Action.REFUSE:
            self.refused("load_weights refused", call)
        elif chance is None:
            self.run(f"{method}({name})", call)
            self.weights, self.reproducible = name, path
            assert self.at == Column.AWAKE
        else:
            with rank_fault(self.engine, STAGE, at, method, **chance), pytest.raises(NeedsWeightsError):
                self.run(f"{method}({name}) fails", call)
            assert self.at == Column.NEEDS_WEIGHTS

    @precondition(lambda self: self.at == Column.FAILED)
    @rule()
    def restart(self) -> None:
        async def go() -> None:
            await self.engine.restart(STAGE)
            await faults.learn(self.engine)

        self.run("restart", go())
        assert self.at == (Column.AWAKE if self.reproducible else Column.NEEDS_WEIGHTS)

    @precondition(lambda self: "abort" not in self.done[-1:])
    @rule()
    def generate_and_abort(self) -> None:
        async def go() -> str:
            outputs = [o async for o in self.engine.generate("a red star", "mine", admission_timeout=0)]
            return str(outputs[-1].state)

        async def both() -> str:
            request = asyncio.create_task(go())
            await until(lambda: "mine" in self.engine._core._flows or request.done())
            await self.engine.abort("mine")
            return await request

        if self.open:
            assert self.run("abort", both()) in {"aborted", "finished"}
        else:
            with pytest.raises(OmniError):
                self.run("abort refused", both())

    # -------------------------------------------------------------------------------- invariants

    @property
    def open(self) -> bool:
        return self.at == Column.AWAKE and not self.engine.status().paused

    @invariant()
    def memory_agrees_with_the_state(self) -> None:
        if not getattr(self, "fresh", False):
            return
        stage = self.stage
        assert stage.state in set(MemoryState)
        if self.at == Column.FAILED:
            assert stage.last_error
            return
        assert [rank.alive for rank in stage.ranks] == [True, True]
        asleep = self.at in {Column.ASLEEP_1, Column.ASLEEP_2}
        awake = () if asleep else stage.awake_tags if self.at == Column.PARTLY_AWAKE else None
        assert faults.residents(self.engine) == faults.spans(self.engine, STAGE, awake)

    @invariant()
    def it_draws_exactly_when_the_gates_are_open(self) -> None:
        if not getattr(self, "fresh", False):
            return
        self.fresh = False
        if self.open:
            assert asyncio.run(golden(self.engine))[1] == self.pictures[self.weights]
            return
        with pytest.raises(OmniError):
            asyncio.run(collect(self.engine, admission_timeout=0))
        if not self.engine.status().paused:
            assert asyncio.run(collect(self.engine, output_modalities="text"))[-1].text

    def teardown(self) -> None:
        async def go() -> None:
            await self.engine.resume_generation()
            if self.at == Column.FAILED:
                await self.engine.restart(STAGE)
                await faults.learn(self.engine)
            await self.engine.wake_up(raise_on_error=False)
            await self.engine.load_weights(STAGE, self.folders["shipped"])
            assert (await golden(self.engine))[1] == self.pictures["shipped"]

        asyncio.run(go())


@pytest.mark.timeout(300)
def test_random_orders_and_faults_leave_named_states_true_memory_and_the_same_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    monkeypatch.setenv(PATIENCE, "3")
    monkeypatch.setattr(transitions, "ABORT_S", 1.0)
    monkeypatch.setattr(transitions, "GRACE_S", 1.0)
    monkeypatch.setattr(replica, "SETTLE_S", 1.0)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    other = tmp_path / "other"
    shutil.copytree(SHIPPED, other)
    tensors = load_file(other / "model.safetensors")
    noise = torch.Generator().manual_seed(5)
    noisy = {k: v + 0.2 * v.std() * torch.randn(v.shape, generator=noise) for k, v in tensors.items()}
    save_file(noisy, other / "model.safetensors")

    own = {1: {"tensor_parallel_size": 2, "ballast_bytes": 2 * MIB}}
    with AsyncOmni("demo", executor="mp", stage_overrides=own) as engine:
        Painter.engine, Painter.done = engine, []
        Painter.folders = {"shipped": SHIPPED, "other": other}
        Painter.tensors = {"shipped": tensors, "other": noisy}
        asyncio.run(faults.learn(engine))
        Painter.pictures = {}
        for name in ("other", "shipped"):
            asyncio.run(engine.load_weights(STAGE, Painter.folders[name]))
            Painter.pictures[name] = asyncio.run(golden(engine))[1]
        assert Painter.pictures["other"] != Painter.pictures["shipped"]
        run_state_machine_as_test(
            Painter,
            settings=settings(
                max_examples=int(os.environ.get("OMNI_TEST_EXAMPLES", EXAMPLES)),
                stateful_step_count=STEPS,
                deadline=None,
                derandomize="OMNI_TEST_EXAMPLES" not in os.environ,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
        print(len(Painter.done), Counter(Painter.done))
        assert len(Painter.done) >= 200
