"""Two ranks of a real vLLM: what each gives back, that the same tokens come after, and what pauses do."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_notebook.config import DEMO_FOLDER
from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.errors import (
    AsleepError,
    ConfigError,
    LoRAError,
    NeedsWeightsError,
    SleepError,
    StageBusyError,
    UnsupportedError,
    WakeError,
)
from omni_notebook.memory.platforms import describe_platforms
from omni_notebook.protocol import MIB, LoRARequest
from omni_notebook.worker.vllm.versions import vllm_version
from tests import adapters
from tests.engine.engine_helpers import until
from tests.vllm.conftest import SMALL
from tests.vllm.models import of_a_type_that_does_not_load, random_llama

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from omni_notebook.protocol import OmniRequestOutput

PROMPT = {"prompt_token_ids": list(range(3, 303))}  # more than two blocks of the cache
LONG = {"max_tokens": 200}  # seconds, for what happens in milliseconds
SHORT = {"max_tokens": 8}


async def outputs(engine: AsyncOmni, params: dict[str, Any] = SHORT, **known: Any) -> list[OmniRequestOutput]:
    return [out async for out in engine.generate(PROMPT, sampling_params=params, **known)]


async def tokens(engine: AsyncOmni, params: dict[str, Any] = SHORT, **known: Any) -> list[int]:
    return (await outputs(engine, params, **known))[-1].outputs[0].token_ids


async def begun(engine: AsyncOmni, count: int, params: dict[str, Any] = LONG) -> list[asyncio.Task[Any]]:
    """Requests of which each has delivered a token."""
    seen = [asyncio.Event() for _ in range(count)]

    async def follow(place: int) -> OmniRequestOutput:
        news = engine.generate(PROMPT, sampling_params=params, request_id=f"request-{place}")
        found = [await anext(news)]
        seen[place].set()
        return [*found, *[out async for out in news]][-1]

    tasks = [asyncio.create_task(follow(place)) for place in range(count)]
    await asyncio.gather(*(event.wait() for event in seen))
    return tasks


ON_CUDA = next(one for one in describe_platforms() if one.platform == "cuda").supported
NEAR = (64 if ON_CUDA else 4) * MIB
"""How far a look from outside may be from what a rank says: NVML's books are coarser."""


def held(pid: int) -> int:
    """What a process holds where its stage lives, seen from outside: NVML's bytes of it, or its RSS."""
    if not ON_CUDA:
        return psutil.Process(pid).memory_info().rss
    import pynvml

    pynvml.nvmlInit()
    devices = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
    running = [one for device in devices for one in pynvml.nvmlDeviceGetComputeRunningProcesses(device)]
    return sum(one.usedGpuMemory for one in running if one.pid == pid)


def pids(engine: AsyncOmni) -> list[int]:
    return [rank.pid for rank in engine.status().stages[0].ranks]


@pytest.mark.parametrize("level", [1, 2])
def test_each_rank_answers_for_itself_and_its_process_shrinks_by_what_it_says(two: AsyncOmni, level: int) -> None:
    before = {pid: held(pid) for pid in pids(two)}
    acks = asyncio.run(two.sleep([0], level=level))
    assert [(ack.status, ack.rank) for ack in acks] == [("SUCCESS", 0), ("SUCCESS", 1)]
    assert len({ack.metadata["pid"] for ack in acks}) == 2
    assert {os.getsid(ack.metadata["pid"]) for ack in acks} == {os.getsid(0)}  # or tokens come in lumps
    assert len({ack.task_id for ack in acks}) == 1
    for ack in acks:
        assert set(ack.metadata["tags"]) == {"weights", "kv_cache"}
        assert ack.metadata["observed_bytes"] == pytest.approx(
            ack.metadata["expected_bytes"], abs=NEAR if ON_CUDA else 0
        )
        assert ack.freed_bytes == min(ack.metadata["expected_bytes"], ack.metadata["observed_bytes"])
        assert ack.freed_bytes >= 64 * MIB
        shrunk = before[ack.metadata["pid"]] - held(ack.metadata["pid"])
        assert shrunk == pytest.approx(ack.freed_bytes, abs=NEAR)
        assert ack.metadata["residual_bytes"] == pytest.approx(held(ack.metadata["pid"]), abs=NEAR)
    woken = asyncio.run(two.wake_up([0]))
    assert [(ack.status, ack.metadata["state"]) for ack in woken] == [("SUCCESS", "WARM")] * 2
    assert all(ack.metadata["mapped_bytes"] >= 64 * MIB for ack in woken)


def test_twenty_cycles_of_both_levels_leave_the_same_tokens_and_no_stale_cache(two: AsyncOmni) -> None:
    golden = asyncio.run(tokens(two))
    residuals = []
    for cycle in range(20):
        acks = asyncio.run(two.sleep([0], level=1 + cycle % 2))
        residuals.append(max(ack.metadata["residual_bytes"] for ack in acks))
        asyncio.run(two.wake_up([0]))
        first, second = (asyncio.run(outputs(two))[-1] for _ in range(2))
        assert first.outputs[0].token_ids == second.outputs[0].token_ids == golden
        assert first.metrics["cached_tokens"] == 0
        assert second.metrics["cached_tokens"] > 0
    assert residuals[-1] - residuals[3] < 8 * MIB


@pytest.mark.parametrize("order", [("weights", "kv_cache"), ("kv_cache", "weights")])
@pytest.mark.parametrize("level", [1, 2])
def test_a_wake_by_tags_serves_only_when_it_is_whole(two: AsyncOmni, level: int, order: tuple[str, str]) -> None:
    golden = asyncio.run(tokens(two))
    asyncio.run(two.sleep([0], level=level))
    asyncio.run(two.wake_up([0], tags=[order[0]]))
    assert str(two.status().stages[0].state) == "PARTLY_AWAKE"
    with pytest.raises(AsleepError):
        asyncio.run(tokens(two, admission_timeout=0))
    asyncio.run(two.wake_up([0], tags=[order[1]]))
    assert asyncio.run(tokens(two)) == golden


def test_a_sleep_with_requests_is_refused_and_with_keep_loses_no_token(two: AsyncOmni) -> None:
    async def scenario() -> None:
        golden = await tokens(two, LONG)
        for level in (1, 2):
            running = await begun(two, 3)
            with pytest.raises(StageBusyError):
                await two.sleep([0], level=level)
            await two.pause_generation(mode="keep")
            await two.sleep([0], level=level)
            assert two.status().stages[0].running == 3
            await two.wake_up([0])
            assert not any(task.done() for task in running)
            await two.resume_generation()
            assert [(await task).outputs[0].token_ids for task in running] == [golden] * 3

    asyncio.run(scenario())


def test_a_keep_pause_freezes_streams_and_resume_goes_on(two: AsyncOmni) -> None:
    async def scenario() -> None:
        golden = await tokens(two, LONG)
        (task,) = await begun(two, 1)
        await two.pause_generation(mode="keep")
        assert two.status().stages[0].running == 1
        done, _ = await asyncio.wait({task}, timeout=0.3)
        assert not done
        await two.resume_generation()
        assert (await task).outputs[0].token_ids == golden

    asyncio.run(scenario())


@pytest.mark.parametrize("clear_cache", [True, False])
def test_a_pause_clears_the_prefix_cache_if_it_is_asked_to(two: AsyncOmni, clear_cache: bool) -> None:
    async def scenario() -> None:
        golden = await tokens(two)
        await two.pause_generation(mode="keep", clear_cache=clear_cache)
        await two.resume_generation()
        after = (await outputs(two))[-1]
        assert (after.metrics["cached_tokens"] == 0) is clear_cache
        assert after.outputs[0].token_ids == golden

    asyncio.run(scenario())


def test_an_abort_pause_ends_requests_and_a_wait_pause_lets_them_end(two: AsyncOmni) -> None:
    async def scenario() -> None:
        running = await begun(two, 2)
        await two.pause_generation(mode="abort")
        assert [str((await task).state) for task in running] == ["aborted"] * 2
        await two.resume_generation()
        golden = await tokens(two, LONG)
        running = await begun(two, 2)
        await two.pause_generation(mode="wait")
        assert all(task.done() for task in running)
        assert [(await task).outputs[0].token_ids for task in running] == [golden] * 2
        await two.resume_generation()

    asyncio.run(scenario())


def test_an_aborted_request_ends_alone(two: AsyncOmni) -> None:
    async def scenario() -> None:
        golden = await tokens(two, LONG)
        running = await begun(two, 2)
        await two.abort("request-0")
        assert str((await running[0]).state) == "aborted"
        assert (await running[1]).outputs[0].token_ids == golden
        await until(lambda: two.status().stages[0].running == 0)

    asyncio.run(scenario())


def test_new_weights_from_a_folder_are_what_runs_and_what_a_level_2_wakes_to(
    two: AsyncOmni, llama: Path, other_llama: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        golden = await tokens(two)
        old = two.status().stages[0].weight_version
        await two.load_weights(0, str(other_llama), version="other")
        changed = await tokens(two)
        assert changed != golden
        assert two.status().stages[0].weight_version == "other"
        await two.sleep([0], level=2)
        await two.wake_up([0])
        assert await tokens(two) == changed
        await two.load_weights(0, str(llama))
        assert await tokens(two) == golden
        assert two.status().stages[0].weight_version == old

    asyncio.run(scenario())


def test_a_restart_keeps_the_weights_that_were_loaded_last(two: AsyncOmni, llama: Path, other_llama: Path) -> None:
    async def scenario() -> None:
        golden = await tokens(two)
        await two.load_weights(0, str(other_llama), version="other")
        changed = await tokens(two)
        await two.restart(0)
        assert two.status().stages[0].weight_version == "other"
        assert await tokens(two) == changed != golden
        await two.load_weights(0, str(llama))
        assert await tokens(two) == golden

    asyncio.run(scenario())


LAST_OF_THREE = "model.layers.0.self_attn.v_proj.weight"
"""vLLM puts it into one parameter with two others, which it reads before."""


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


TAMPER: dict[str, tuple[Callable[[Path], Any], str]] = {
    "deleted": (shutil.rmtree, "no such model folder"),
    "truncated": (lambda folder: _truncate(folder / "model.safetensors"), "not a whole safetensors file"),
    "of another shape": (lambda folder: random_llama(folder, seed=3, intermediate_size=768), "mlp.* has shape"),
    "of other values": (lambda folder: random_llama(folder, seed=3), "its checksum differs"),
    "of another type": (lambda folder: of_a_type_that_does_not_load(folder, LAST_OF_THREE), "AssertionError"),
}


@pytest.mark.parametrize("what", TAMPER)
def test_a_checkpoint_that_changes_while_its_weights_are_gone_is_named_and_the_old_one_put_back_wakes(
    two: AsyncOmni, llama: Path, tmp_path: Path, what: str
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(llama, folder)
    change, message = TAMPER[what]

    async def scenario() -> None:
        golden = await tokens(two)
        await two.load_weights(0, str(folder))
        await two.sleep([0], level=2)
        change(folder)
        with pytest.raises(WakeError, match=message):
            await two.wake_up([0])
        assert str(two.status().stages[0].state) == "ASLEEP"
        shutil.copytree(llama, folder, dirs_exist_ok=True)
        await two.wake_up([0])
        assert await tokens(two) == golden
        await two.load_weights(0, str(llama))

    asyncio.run(scenario())


@pytest.mark.parametrize("times", [1, 2])
def test_a_load_that_breaks_off_half_way_leaves_the_next_one_whole(
    two: AsyncOmni, llama: Path, other_llama: Path, tmp_path: Path, times: int
) -> None:
    broken = of_a_type_that_does_not_load(random_llama(tmp_path, seed=3), LAST_OF_THREE)

    async def scenario() -> None:
        golden = await tokens(two)
        await two.load_weights(0, str(other_llama))
        changed, version = await tokens(two), two.status().stages[0].weight_version
        residual = max(ack.metadata["residual_bytes"] for ack in await two.sleep([0], level=2))
        await two.wake_up([0])
        for _ in range(times):
            with pytest.raises(NeedsWeightsError, match=f"could not load {broken}"):
                await two.load_weights(0, str(broken))
        await two.load_weights(0, str(other_llama))
        assert two.status().stages[0].weight_version == version
        assert await tokens(two) == changed != golden
        acks = await two.sleep([0], level=2)  # what sleeps is what computes
        assert all(ack.metadata["residual_bytes"] < residual + 8 * MIB for ack in acks)
        await two.wake_up([0])
        assert await tokens(two) == changed
        await two.load_weights(0, str(llama))
        assert await tokens(two) == golden

    asyncio.run(scenario())


def _without(folder: Path, name: str) -> Path:
    """A checkpoint that lacks a tensor."""
    state = load_file(random_llama(folder, seed=1) / "model.safetensors")
    del state[name]
    save_file(state, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["made up", "pickled"])
def test_weights_that_no_file_can_bring_back_give_way_to_a_folder_s_which_are_kept(
    kind: str, llama: Path, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("wide", "short", "thin")]
    for folder in folders:
        folder.mkdir()
    wide = random_llama(folders[0], seed=3, intermediate_size=768)
    lacking = {
        "layers.3.mlp.down_proj": _without(folders[1], "model.layers.3.mlp.down_proj.weight"),
        "layers.0.self_attn.qkv_proj": _without(folders[2], LAST_OF_THREE),
    }

    async def scenario() -> None:
        made_up = await tokens(engine)
        with pytest.raises(SleepError, match="came from no checkpoint path"):
            await engine.sleep([0], level=2, discard=False)
        with pytest.raises(ConfigError, match="its intermediate_size is 768, not 512"):
            await engine.load_weights(0, str(wide))
        assert await tokens(engine) == made_up
        for name, folder in lacking.items():
            with pytest.raises(NeedsWeightsError, match=f"could not load {folder}: .* lacks .*{name}"):
                await engine.load_weights(0, str(folder))
        await engine.load_weights(0, str(llama))
        assert await tokens(engine) == golden != made_up
        await engine.sleep([0], level=2)
        await engine.wake_up([0])
        assert await tokens(engine) == golden
        with pytest.raises(ConfigError, match=r"mlp.* has shape .* tensors\); nothing changed, stage 0 is AWAKE$"):
            await engine.load_weights(0, str(wide))
        await engine.restart(0)
        assert await tokens(engine) == golden

    plain = shutil.copytree(llama, tmp_path / "plain")
    shutil.copy(DEMO_FOLDER / "thinker" / "tokenizer.json", plain)  # which our own runtime needs, for prompts of text
    with AsyncOmni(str(plain), runtime="torch") as ours:
        golden = asyncio.run(tokens(ours))
    first, options = {"made up": (llama, {"load_format": "dummy"}), "pickled": (_pickled(tmp_path / "bin"), {})}[kind]
    with AsyncOmni(str(first), runtime="vllm", engine_args={**SMALL, **options}) as engine:
        asyncio.run(scenario())


def _pickled(folder: Path) -> Path:
    """A folder of the kind that was there before safetensors."""
    folder.mkdir()
    state = load_file(random_llama(folder, seed=4) / "model.safetensors")
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def test_a_rank_that_hangs_ends_the_order_at_its_deadline_and_all_goes_on_after(two: AsyncOmni) -> None:
    async def scenario() -> None:
        golden = await tokens(two)
        victim = two.status().stages[0].ranks[1].pid
        os.kill(victim, signal.SIGSTOP)
        try:
            began_s = time.perf_counter()
            with pytest.raises(SleepError) as caught:
                await two.sleep([0], level=1, timeout=2)
            assert time.perf_counter() - began_s < 20
        finally:
            os.kill(victim, signal.SIGCONT)
        idle, hanging = (ack.metadata["error_code"] for ack in caught.value.acks)
        assert hanging == "DEADLINE"
        assert idle in {"DEADLINE", "ROLLED_BACK"}  # vLLM 0.32 waits for all ranks already while it pauses
        assert str(two.status().stages[0].state) == "AWAKE"
        assert await tokens(two) == golden

    asyncio.run(scenario())


def test_a_host_that_hangs_ends_the_order_by_the_order_s_name_and_all_goes_on_after(two: AsyncOmni) -> None:
    async def scenario() -> None:
        golden = await tokens(two)
        await two.pause_generation(mode="keep")
        host = psutil.Process(pids(two)[0]).parent().parent()
        host.suspend()
        try:
            with pytest.raises(SleepError, match="rank 0 of stage 0 did not answer 'barrier' within") as caught:
                await two.sleep([0], level=1, timeout=1)
        finally:
            host.resume()
        assert [ack.rank for ack in caught.value.acks] == [0, 1]
        assert str(two.status().stages[0].state) == "AWAKE"
        await two.resume_generation()
        assert await tokens(two) == golden

    asyncio.run(scenario())


def test_weights_that_do_not_fit_change_nothing(two: AsyncOmni, other_llama: Path, tmp_path: Path) -> None:
    wide, twice, junk = (tmp_path / name for name in ("wide", "twice", "junk"))
    wide.mkdir()
    random_llama(wide, seed=3, intermediate_size=768)
    for folder in (twice, junk):
        shutil.copytree(other_llama, folder)
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.ones(256, 256)}, twice / "a.safetensors")
    (junk / "b.safetensors").write_bytes(b"junk" * 100)

    async def scenario() -> None:
        golden = await tokens(two)
        with pytest.raises(ConfigError, match=r"mlp.* has shape"):
            await two.load_weights(0, str(wide))
        with pytest.raises(ConfigError, match=r"q_proj.weight is also in a.safetensors"):
            await two.load_weights(0, str(twice))
        with pytest.raises(ConfigError, match=r"b.safetensors: not a whole safetensors file"):
            await two.load_weights(0, str(junk))
        with pytest.raises(UnsupportedError, match="checkpoint folder"):
            await two.load_weights(0, {"lm_head.weight": torch.zeros(512, 256)})
        assert await tokens(two) == golden

    asyncio.run(scenario())


@pytest.mark.skipif(
    vllm_version().startswith("0.24") and not ON_CUDA,
    reason="vLLM 0.24's own adapters fail on a CPU with two ranks (einsum)",
)
def test_an_adapter_changes_who_names_it_and_survives_both_levels(two: AsyncOmni, tmp_path: Path) -> None:
    shapes = two._core.stages[0].model.adaptable
    path = adapters.write(tmp_path / "style", adapters.matrices(shapes, seed=1, size=2.0))
    request = LoRARequest("style", 1, str(path))

    async def scenario() -> None:
        golden = await tokens(two)
        await two.add_lora(request)
        styled = await tokens(two, lora_request=request)
        assert styled != golden
        for level in (1, 2):
            await two.sleep([0], level=level)
            await two.wake_up([0])
            assert await _vllm(two, "list_loras") == [1]
            assert await tokens(two, lora_request=request) == styled
            assert await tokens(two) == golden
        await two.pin_lora(1)
        assert [(lora.lora_name, lora.pinned) for lora in two.status().stages[0].loras] == [("style", True)]
        assert await _vllm(two, "list_loras") == [1]
        await two.remove_lora(1)
        assert await _vllm(two, "list_loras") == []
        assert await tokens(two) == golden

    asyncio.run(scenario())


@pytest.mark.skipif(vllm_version().startswith("0.24"), reason="vLLM 0.24 takes adapters of any initialisation")
def test_an_adapter_that_only_vllm_refuses_is_on_no_rank_and_the_next_is_served(two: AsyncOmni, tmp_path: Path) -> None:
    async def scenario() -> None:
        golden = await tokens(two)
        shapes = adapters.matrices(two._core.stages[0].model.adaptable, seed=1, size=2.0)
        odd = adapters.write(tmp_path / "odd", shapes, init_lora_weights="of another kind")
        for _ in range(2):
            with pytest.raises(
                LoRAError, match=r"rank 0 of stage 0 could not take adapter .*of another kind.*nothing changed"
            ):
                await two.add_lora(LoRARequest("odd", 1, str(odd)))
        assert await tokens(two) == golden
        style = LoRARequest("style", 2, str(adapters.write(tmp_path / "style", shapes)))
        await two.add_lora(style)
        assert await tokens(two, lora_request=style) != golden
        assert await _vllm(two, "list_loras") == [2]
        await two.remove_lora(2)

    asyncio.run(scenario())


def _style(engine: AsyncOmni, path: Path, seed: int) -> Path:
    return adapters.write(path, adapters.matrices(engine._core.stages[0].model.adaptable, seed=seed, size=2.0))


def test_an_adapter_written_over_another_s_files_computes_nothing_from_the_other_s_cache(
    two: AsyncOmni, tmp_path: Path
) -> None:
    async def scenario() -> None:
        last = LoRARequest("style", 1, str(_style(two, tmp_path / "style", seed=1)))
        await two.add_lora(last)
        first = await tokens(two, lora_request=last)
        await two.remove_lora(1)
        _style(two, tmp_path / "style", seed=2)
        await two.add_lora(last)
        second = (await outputs(two, lora_request=last))[-1]
        assert second.metrics["cached_tokens"] == 0
        same = LoRARequest("same", 2, str(_style(two, tmp_path / "same", seed=2)))
        await two.add_lora(same)
        assert second.outputs[0].token_ids == await tokens(two, lora_request=same) != first
        await two.remove_lora(1)
        await two.remove_lora(2)

    asyncio.run(scenario())


def test_adapters_that_find_no_slot_need_their_files_no_more_than_the_others(two: AsyncOmni, tmp_path: Path) -> None:
    count = two._core.stages[0].config.max_loras + 2

    async def scenario() -> None:
        golden = await tokens(two)
        styles = []
        for number in range(1, count + 1):
            path = _style(two, tmp_path / f"style{number}", seed=number)
            styles.append(LoRARequest(f"style{number}", number, str(path)))
            await two.add_lora(styles[-1])
        styled = [await tokens(two, lora_request=one) for one in styles]
        for one in styles[::2]:
            shutil.rmtree(one.lora_path)
        for one in styles[1::2]:
            _style(two, tmp_path / one.lora_name, seed=100)
        assert [await tokens(two, lora_request=one) for one in styles] == styled
        await two.sleep([0], level=2)
        await two.wake_up([0])
        assert [await tokens(two, lora_request=one) for one in styles] == styled
        for one in styles:
            await two.remove_lora(one.lora_int_id)
        assert await tokens(two) == golden

    asyncio.run(scenario())


async def _vllm(engine: AsyncOmni, method: str, *arguments: Any) -> Any:
    executor: Any = engine._core.stages[0].replicas[0].executor
    return await asyncio.wrap_future(engine.submit(executor.ask_host("ask_vllm", method, list(arguments))))


@pytest.mark.parametrize("level", [1, 2])
def test_vllm_says_it_sleeps_when_it_does_and_its_own_sleep_underneath_is_refused(two: AsyncOmni, level: int) -> None:
    async def scenario() -> None:
        golden = await tokens(two)
        assert await _vllm(two, "is_sleeping") is False
        running = await begun(two, 2)
        with pytest.raises(Exception, match=r"was called under stage 0.*memory is as it was"):
            await _vllm(two, "sleep", level)
        assert {(await task).state for task in running} == {"aborted"}  # by vLLM, before its ranks were asked
        assert [str(stage.state) for stage in two.status().stages] == ["AWAKE"]
        assert await tokens(two) == golden
        assert any("was called under stage 0" in line for line in two.logs(0))
        await two.sleep([0], level=level)
        assert await _vllm(two, "is_sleeping") is True
        for name in ("wake_up", "resume_generation"):
            with pytest.raises(
                Exception, match=rf"vLLM's own {name}\(\) was called under stage 0.*memory is as it was"
            ):
                await _vllm(two, name)
            assert any(f"own {name}() was called under stage 0" in line for line in two.logs(0))
        assert await _vllm(two, "is_sleeping") is True
        await two.wake_up([0])
        assert await tokens(two) == golden
        assert await _vllm(two, "is_sleeping") is False

    asyncio.run(scenario())


@pytest.mark.skipif(ON_CUDA, reason="a GPU's ranks write no spill file; tests/gpu has a rank that finds no room")
def test_a_rank_that_can_not_back_up_leaves_all_awake(two: AsyncOmni, llama: Path) -> None:
    """RLIMIT_FSIZE of a real process stands for a full disk: the kernel refuses the write all the same."""

    async def scenario() -> None:
        golden = await tokens(two)
        culprit = pids(two)[1]
        limits = resource.prlimit(culprit, resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
        try:
            await two.load_weights(0, str(llama))  # what was backed up before is old now
            with pytest.raises(SleepError, match=r"rank 1.*File too large") as caught:
                await two.sleep([0], level=1)
            codes = {ack.rank: ack.metadata["error_code"] for ack in caught.value.acks}
            assert codes[0] == "ROLLED_BACK"
            assert codes[1] in {"OUT_OF_MEMORY", "OSError"}
            assert str(two.status().stages[0].state) == "AWAKE"
            assert all(tag.resident_bytes for rank in two.status().stages[0].ranks for tag in rank.tags.values())
            assert await tokens(two) == golden
        finally:
            resource.prlimit(culprit, resource.RLIMIT_FSIZE, limits)
        assert [ack.status for ack in await two.sleep([0], level=1)] == ["SUCCESS"] * 2
        await two.wake_up([0])
        assert await tokens(two) == golden

    asyncio.run(scenario())


def test_ranks_that_have_no_time_to_come_to_rest_stay_awake(two: AsyncOmni) -> None:
    async def scenario() -> None:
        golden = await tokens(two)
        with pytest.raises(SleepError) as caught:
            await two.sleep([0], level=1, timeout=1e-6)
        assert len(caught.value.acks) == 2
        assert str(two.status().stages[0].state) == "AWAKE"
        assert await tokens(two) == golden

    asyncio.run(scenario())
