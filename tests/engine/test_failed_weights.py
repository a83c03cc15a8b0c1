"""Weights that fail on one rank of four: never a mix of two checkpoints, and no room or no file is a way back."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from omni_notebook.config import DEMO_FOLDER
from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.errors import ConfigError, NeedsWeightsError
from omni_notebook.protocol import MIB
from tests.engine.engine_helpers import collect, golden, rank_fault, until
from tests.engine.faults import (
    CULPRIT,
    PLACES,
    STAGE,
    Cgroup,
    brought_back,
    culprits_ack,
    goldens,
    learn,
    outcome,
    pid_of,
    places,
    residents,
    serves,
    spans,
    state_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHIPPED = DEMO_FOLDER / "dit"
FILE = "model.safetensors"


@pytest.fixture
def engine(four: AsyncOmni) -> Iterator[AsyncOmni]:
    yield four
    if state_of(four) in {"AWAKE", "NEEDS_WEIGHTS"}:
        asyncio.run(four.load_weights(STAGE, SHIPPED))


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The painter with other weights in every matrix."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "other"
    shutil.copytree(SHIPPED, folder)
    tensors = load_file(folder / FILE)
    noise = torch.Generator().manual_seed(5)
    save_file({k: v + 0.2 * v.std() * torch.randn(v.shape, generator=noise) for k, v in tensors.items()}, folder / FILE)
    return folder


def versions(engine: AsyncOmni) -> Any:
    return engine.status().stages[STAGE].weight_version


@pytest.mark.parametrize("way_out", ["wake", "load", "restart", "sleep and wake"])
@pytest.mark.parametrize("after", [False, True], ids=["before it loaded", "after it loaded"])
def test_weights_that_one_rank_could_not_load_are_nobodys(
    engine: AsyncOmni, other: Path, after: bool, way_out: str
) -> None:
    broken = {"error": "OSError", "args": [5, "the disk failed"], "after": after}

    async def run() -> None:
        before = versions(engine)
        with (
            rank_fault(engine, STAGE, CULPRIT, "load_weights", **broken),
            pytest.raises(NeedsWeightsError, match=r"rank 1 of replica 1 of stage 1 .*the disk failed.*wake_up"),
        ):
            await engine.load_weights(STAGE, other)
        assert state_of(engine) == "NEEDS_WEIGHTS"
        with pytest.raises(NeedsWeightsError, match=r"load_weights\(1"):
            await collect(engine, admission_timeout=0)
        await serves(engine)
        if way_out == "load":
            await engine.load_weights(STAGE, SHIPPED)
        elif way_out == "restart":
            await engine.restart(STAGE)
        else:
            if way_out == "sleep and wake":
                assert all(ack.ok for ack in await engine.sleep([STAGE], level=2))
            acks = await engine.wake_up([STAGE])
            assert places(acks) == PLACES
            assert {(ack.ok, ack.metadata["weight_version"]) for ack in acks} == {(True, before)}
        assert (state_of(engine), versions(engine)) == ("AWAKE", before)
        assert await golden(engine) == goldens[id(engine)]

    asyncio.run(run())


def test_weights_that_do_not_fit_one_rank_change_none(engine: AsyncOmni, other: Path) -> None:
    async def run() -> None:
        broken = {"error": "OSError", "args": [5, "the disk failed"]}
        with rank_fault(engine, STAGE, CULPRIT, "prepare_weights", **broken), pytest.raises(OSError, match="disk"):
            await engine.load_weights(STAGE, other)
        assert state_of(engine) == "AWAKE"
        assert await golden(engine) == goldens[id(engine)]

    asyncio.run(run())


def test_a_second_try_at_the_same_weights_that_fails_leads_back_to_them(engine: AsyncOmni, other: Path) -> None:
    async def run() -> None:
        await engine.load_weights(STAGE, other)
        changed = await golden(engine)
        for after in (False, True):
            broken = {"error": "OSError", "args": [5, "the disk failed"], "after": after}
            with (
                rank_fault(engine, STAGE, CULPRIT, "load_weights", **broken),
                pytest.raises(NeedsWeightsError, match="disk"),
            ):
                await engine.load_weights(STAGE, other)
            await engine.wake_up([STAGE])
            assert await golden(engine) == changed

    asyncio.run(run())


def test_weights_that_no_rank_could_load_change_nothing(engine: AsyncOmni, tmp_path: Path) -> None:
    async def run() -> None:
        with pytest.raises(ConfigError):
            await engine.load_weights(STAGE, tmp_path)
        assert state_of(engine) == "AWAKE"
        assert await golden(engine) == goldens[id(engine)]

    asyncio.run(run())


def test_loaded_weights_are_on_all_ranks_and_stay_through_sleep_and_restart(engine: AsyncOmni, other: Path) -> None:
    async def run() -> None:
        await engine.load_weights(STAGE, other, version="other")
        changed = await golden(engine)
        assert changed[1] != goldens[id(engine)][1]
        await engine.sleep([STAGE], level=2)
        acks = await engine.wake_up([STAGE])
        assert {ack.metadata["weight_version"] for ack in acks} == {"other"}
        assert await golden(engine) == changed
        await engine.restart(STAGE)
        assert await golden(engine) == changed

    asyncio.run(run())


@pytest.mark.parametrize("replica", [0, 1])
def test_weights_written_in_one_replica_and_discarded_are_not_woken_as_a_mix(engine: AsyncOmni, replica: int) -> None:
    async def run() -> None:
        executor = engine._core.stages[STAGE].replicas[replica].executor
        await asyncio.wrap_future(engine.submit(executor.call("scribble", "data")))
        acks = await engine.sleep([STAGE], level=2)
        assert [ack.metadata["recoverable"] for ack in acks] == [ack.metadata["replica"] != replica for ack in acks]
        await engine.wake_up([STAGE])
        assert state_of(engine) == "NEEDS_WEIGHTS"
        await engine.wake_up([STAGE])  # takes the last checkpoint, as its message says
        assert state_of(engine) == "AWAKE"
        assert await golden(engine) == goldens[id(engine)]

    asyncio.run(run())


@pytest.mark.parametrize("harm", ["gone", "changed"])
def test_a_checkpoint_that_is_not_as_it_was_stops_the_wake_of_all_ranks(
    engine: AsyncOmni, tmp_path: Path, harm: str
) -> None:
    folder = tmp_path / "dit"
    shutil.copytree(SHIPPED, folder)
    original = (folder / FILE).read_bytes()

    async def run() -> None:
        await engine.load_weights(STAGE, folder)
        await engine.sleep([STAGE], level=2)
        if harm == "gone":
            (folder / FILE).unlink()
        else:
            (folder / FILE).write_bytes(original[:-4096] + bytes(4096))
        seen = await outcome(engine, "wake")
        assert (seen.state, seen.level) == ("ASLEEP", 2)
        assert places(seen.acks) == PLACES
        assert {ack.status for ack in seen.acks} == {"ERROR"}
        assert ("checksum differs" if harm == "changed" else FILE) in seen.message
        assert residents(engine) == [0] * 4
        await serves(engine)
        (folder / FILE).write_bytes(original)
        assert all(ack.ok for ack in await engine.wake_up([STAGE]))
        assert await golden(engine) == goldens[id(engine)]

    asyncio.run(run())


def test_a_spill_that_one_rank_can_not_write_leaves_all_awake(engine: AsyncOmni) -> None:
    """RLIMIT_FSIZE of a real process stands for a full disk: the kernel refuses the write all the same."""

    async def run() -> None:
        limits = resource.prlimit(pid_of(engine), resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
        try:
            await engine.load_weights(STAGE, SHIPPED)  # what was backed up before is old now
            seen = await outcome(engine, "sleep", 1)
            assert (seen.state, seen.level) == ("AWAKE", None)
            assert places(seen.acks) == PLACES
            assert culprits_ack(seen.acks).metadata["error_code"] in {"OUT_OF_MEMORY", "OSError"}
            assert all("rank 1 of replica 1" in str(ack.error_msg) for ack in seen.acks)
            assert all("File too large" in str(ack.error_msg) for ack in seen.acks)
            assert residents(engine) == spans(engine)
            await serves(engine)
            assert all(ack.ok for ack in await engine.sleep([STAGE], level=2))  # needs no spill
            await engine.wake_up([STAGE])
        finally:
            resource.prlimit(pid_of(engine), resource.RLIMIT_FSIZE, limits)
        assert all(ack.ok for ack in await engine.sleep([STAGE], level=1))
        await engine.wake_up([STAGE])
        assert await golden(engine) == goldens[id(engine)]

    asyncio.run(run())


@pytest.fixture
def little_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "little"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], check=False)
    if mounted.returncode != 0:
        pytest.skip("no right to mount a tmpfs here; the file size limit of another test stands for a full disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_two_ranks_that_fill_a_disk_together_both_stay_awake(little_disk: Path) -> None:
    async def run(engine: AsyncOmni) -> None:
        acks = await engine.sleep([0], level=1, raise_on_error=False)
        assert {ack.status for ack in acks} == {"ERROR"}
        assert "OUT_OF_MEMORY" in {ack.metadata["error_code"] for ack in acks}
        assert state_of(engine, 0) == "AWAKE"
        await asyncio.to_thread(subprocess.run, ["mount", "-o", "remount,size=64m", str(little_disk)], check=True)
        assert all(ack.ok for ack in await engine.sleep([0], level=1))
        await engine.wake_up()

    with AsyncOmni(SHIPPED, tensor_parallel_size=2, spill_dir=str(little_disk)) as engine:
        asyncio.run(run(engine))
    assert os.statvfs(little_disk).f_bfree == os.statvfs(little_disk).f_blocks


@pytest.mark.parametrize("level", [1, 2])
def test_a_rank_without_room_to_map_leaves_all_asleep_until_there_is_room(engine: AsyncOmni, level: int) -> None:
    """A real memory cgroup around one rank; without the right to make one, a fault of the same kind in its process."""

    async def run() -> None:
        await engine.sleep([STAGE], level=level)
        try:
            group = Cgroup(pid_of(engine), 5 * MIB)
        except OSError:
            with rank_fault(engine, STAGE, CULPRIT, "map_restore", error="MemoryError", args=["no room"]):
                seen, group = await outcome(engine, "wake"), None
        else:
            seen = await outcome(engine, "wake")
            group.set(1024 * MIB)
        assert (seen.state, seen.level) == ("ASLEEP", level)
        assert places(seen.acks) == PLACES
        assert {ack.status for ack in seen.acks} == {"ERROR"}
        if group is not None:
            assert culprits_ack(seen.acks).metadata["error_code"] == "OUT_OF_MEMORY"
        assert all("rank 1 of replica 1" in str(ack.error_msg) for ack in seen.acks)
        assert residents(engine) == [0] * 4
        await serves(engine)
        assert all(ack.ok for ack in await engine.wake_up([STAGE]))
        assert await golden(engine) == goldens[id(engine)]
        if group is not None:
            group.remove()

    asyncio.run(run())


def test_a_failed_stage_restarts_with_the_weights_it_had(engine: AsyncOmni) -> None:
    async def run() -> None:
        os.kill(pid_of(engine, (0, 0)), 9)
        await until(lambda: state_of(engine) == "FAILED", 5)
        await brought_back(engine)
        await learn(engine)

    asyncio.run(run())
