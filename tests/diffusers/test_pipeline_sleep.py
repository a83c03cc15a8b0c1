"""A pipeline's sub-models asleep and awake: what is given back, what comes back, and in which order it may."""

from __future__ import annotations

import asyncio
import itertools
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file, save_file

from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.errors import AsleepError, SleepError, WakeError
from omni_notebook.protocol import MIB
from tests.diffusers.drawing import outputs, picture, plain
from tests.diffusers.pipelines import COMPONENTS, TEXT_FILE, UNET_FILE, rename_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator


def state(engine: AsyncOmni) -> tuple[str, int | None, set[str]]:
    stage = engine.status().stages[0]
    return str(stage.state), stage.level, set(stage.awake_tags)


def anonymous_bytes(pid: int) -> int:
    """Private memory of a process, as the kernel counts it."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return int(re.search(r"^Anonymous:\s+(\d+) kB", text, re.MULTILINE)[1]) * 1024


def test_it_draws_what_plain_diffusers_draws(engine: AsyncOmni, folder: Path) -> None:
    final = asyncio.run(outputs(engine))[-1]
    assert final.images[0].tobytes() == plain(folder)
    assert (final.images[0].size, final.images[0].mode, final.metrics["num_inference_steps"]) == ((16, 16), "RGB", 4)
    assert final.png[0].startswith(b"\x89PNG")
    assert final.weight_version == engine.status().stages[0].weight_version


def test_each_component_has_a_tag_and_nothing_else_has(engine: AsyncOmni) -> None:
    stage = engine.status().stages[0]
    assert (stage.runtime, stage.kind, set(stage.awake_tags)) == ("diffusers", "diffusion", set(COMPONENTS))
    assert set(stage.ranks[0].tags) == set(COMPONENTS)


@pytest.mark.alone
@pytest.mark.parametrize("level", [1, 2])
def test_the_ack_says_what_the_kernel_sees(engine: AsyncOmni, level: int) -> None:
    pid = engine.status().stages[0].ranks[0].pid
    before = anonymous_bytes(pid)
    (ack,) = asyncio.run(engine.sleep([0], level=level))
    shrunk = before - anonymous_bytes(pid)
    assert (ack.status, ack.metadata["level"], ack.metadata["recoverable"]) == ("SUCCESS", level, True)
    assert set(ack.metadata["tags"]) == set(COMPONENTS)
    assert ack.freed_bytes == ack.metadata["expected_bytes"] == ack.metadata["observed_bytes"] == 8 * MIB
    assert sum(tag["freed"] for tag in ack.metadata["tags"].values()) == ack.freed_bytes
    assert shrunk == pytest.approx(ack.freed_bytes, abs=MIB)
    backups = {tag["backup"] for tag in ack.metadata["tags"].values()}
    assert backups == ({"spill"} if level == 1 else {None, "host"})  # at level 2 buffers alone
    (woken,) = asyncio.run(engine.wake_up([0]))
    assert (woken.status, woken.metadata["state"], woken.metadata["mapped_bytes"]) == ("SUCCESS", "WARM", 8 * MIB)
    assert (woken.metadata["phases_ms"]["reload"] is None) == (level == 1)


def test_twenty_mixed_cycles_leave_the_same_picture(engine: AsyncOmni) -> None:
    golden = asyncio.run(picture(engine))
    version = engine.status().stages[0].weight_version
    for cycle in range(20):
        asyncio.run(engine.sleep([0], level=1 + cycle % 2))
        if cycle % 5 == 0:
            asyncio.run(engine.sleep([0], level=2))  # drops a backup, or has nothing to do
        asyncio.run(engine.wake_up([0]))
        assert asyncio.run(picture(engine)) == golden
    assert engine.status().stages[0].weight_version == version


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("order", list(itertools.permutations(COMPONENTS)), ids="-".join)
def test_components_wake_in_any_order_and_it_draws_when_all_are_awake(
    engine: AsyncOmni, level: int, order: tuple[str, ...]
) -> None:
    golden = asyncio.run(picture(engine))
    asyncio.run(engine.sleep([0], level=level))
    for place, tag in enumerate(order, start=1):
        with pytest.raises(AsleepError):
            asyncio.run(picture(engine, admission_timeout=0.0))
        (ack,) = asyncio.run(engine.wake_up([0], tags=[tag]))
        assert (ack.status, ack.metadata["phases_ms"]["reload"] is None) == ("SUCCESS", level == 1)
        whole = place == len(order)
        assert state(engine) == ("AWAKE" if whole else "PARTLY_AWAKE", None if whole else level, set(order[:place]))
        awake = {tag for tag, held in engine.status().stages[0].ranks[0].tags.items() if held.resident_bytes}
        assert awake == set(order[:place])
    assert asyncio.run(picture(engine)) == golden


def test_what_is_partly_awake_sleeps_again_and_comes_back_whole(engine: AsyncOmni) -> None:
    golden = asyncio.run(picture(engine))
    for first, second in itertools.product((1, 2), repeat=2):
        asyncio.run(engine.sleep([0], level=first))
        asyncio.run(engine.wake_up([0], tags=["unet"]))
        (ack,) = asyncio.run(engine.sleep([0], level=second))
        assert (ack.status, set(ack.metadata["tags"]), ack.metadata["recoverable"]) == ("SUCCESS", {"unet"}, True)
        (woken,) = asyncio.run(engine.wake_up([0]))
        assert (woken.status, state(engine)[0]) == ("SUCCESS", "AWAKE")
        assert asyncio.run(picture(engine)) == golden


def test_a_component_that_was_mapped_without_weights_is_reloaded_with_the_rest(engine: AsyncOmni) -> None:
    golden = asyncio.run(picture(engine))
    asyncio.run(engine.sleep([0], level=2))
    asyncio.run(engine.wake_up([0], tags=["vae"], reload=False))
    asyncio.run(engine.wake_up([0], tags=["unet"]))
    asyncio.run(engine.wake_up([0], tags=["text_encoder"], reload=False))
    assert state(engine)[0] == "NEEDS_WEIGHTS"
    asyncio.run(engine.wake_up([0]))
    assert state(engine)[0] == "AWAKE"
    assert asyncio.run(picture(engine)) == golden


@pytest.mark.parametrize("tag", ["weights", "kv_cache", "scheduler", "tokenizer"])
def test_an_unknown_tag_is_refused_and_the_valid_ones_are_named(engine: AsyncOmni, tag: str) -> None:
    asyncio.run(engine.sleep([0]))
    with pytest.raises(ValueError, match=f"no tag '{tag}'; these stages have text_encoder, unet, vae. Nothing changed"):
        asyncio.run(engine.wake_up([0], tags=[tag]))
    assert state(engine)[0] == "ASLEEP"


# --------------------------------------------------------------------------------- files and level 2


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copied"))


@pytest.fixture
def own(copied: Path) -> Iterator[AsyncOmni]:
    """An engine whose files a test may spoil."""
    with AsyncOmni(str(copied), executor="uni") as engine:
        yield engine


@pytest.mark.parametrize("trouble", ["gone", "cut short"])
def test_a_wake_whose_files_are_gone_or_cut_short_changes_nothing_and_works_when_they_are_back(
    own: AsyncOmni, copied: Path, folder: Path, trouble: str
) -> None:
    golden = asyncio.run(picture(own))
    asyncio.run(own.sleep([0], level=2))
    file = copied / UNET_FILE
    if trouble == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(WakeError, match="unet") as caught:
        asyncio.run(own.wake_up([0]))
    assert "\n" not in str(caught.value)
    assert state(own) == ("ASLEEP", 2, set())
    assert sum(held.resident_bytes for held in own.status().stages[0].ranks[0].tags.values()) == 0
    shutil.copy(folder / UNET_FILE, file)
    asyncio.run(own.wake_up([0]))
    assert asyncio.run(picture(own)) == golden


def test_a_wake_whose_files_were_replaced_finds_it_by_the_checksum(own: AsyncOmni, copied: Path, other: Path) -> None:
    asyncio.run(own.sleep([0], level=2))
    shutil.copy(other / UNET_FILE, copied / UNET_FILE)
    asyncio.run(own.wake_up([0], tags=["vae"]))  # its own files are the old ones
    with pytest.raises(WakeError, match="not the one that was loaded"):
        asyncio.run(own.wake_up([0]))
    assert state(own) == ("PARTLY_AWAKE", 2, {"vae"})


def test_level_2_is_refused_without_discard_once_a_file_or_a_tensor_was_changed(own: AsyncOmni, copied: Path) -> None:
    file = copied / TEXT_FILE
    tensors = load_file(file)
    save_file({**tensors, "added": tensors[next(iter(tensors))].clone()}, file, metadata={"format": "pt"})
    with pytest.raises(SleepError, match="level 2 would discard weights that can not be had again"):
        asyncio.run(own.sleep([0], level=2, discard=False))
    assert state(own)[0] == "AWAKE"


def test_weights_under_names_that_only_the_library_knows_come_back_too(copied: Path, folder: Path) -> None:
    rename_tensors(copied / TEXT_FILE, "text_model.")  # as older releases of transformers wrote them
    with AsyncOmni(str(copied), executor="uni") as engine:
        golden = asyncio.run(picture(engine))
        assert golden == plain(folder)
        for _ in range(2):
            asyncio.run(engine.sleep([0], level=2))
            asyncio.run(engine.wake_up([0], tags=["text_encoder"]))
            asyncio.run(engine.wake_up([0]))
            assert asyncio.run(picture(engine)) == golden


def test_backup_by_checkpoint_keeps_no_copy_and_brings_every_component_back(folder: Path) -> None:
    with AsyncOmni(str(folder), executor="uni", backup="checkpoint") as engine:
        golden = asyncio.run(picture(engine))
        (ack,) = asyncio.run(engine.sleep([0], level=1))
        assert {tag["backup"] for tag in ack.metadata["tags"].values()} == {"checkpoint"}
        assert ack.metadata["host_backup_bytes"] < MIB
        asyncio.run(engine.wake_up([0], tags=["vae"]))
        asyncio.run(engine.wake_up([0]))
        assert asyncio.run(picture(engine)) == golden
