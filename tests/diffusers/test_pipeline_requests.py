"""Requests to a pipeline: seeds, batches, parameters, aborts, pauses, new weights, a rank that dies."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_notebook.errors import (
    ArgumentError,
    AsleepError,
    ConfigError,
    OmniError,
    PausedError,
    StageBusyError,
    UnsupportedError,
)
from tests.diffusers.drawing import outputs, picture, plain, running
from tests.diffusers.pipelines import UNET_FILE, edit_json
from tests.engine.engine_helpers import until

if TYPE_CHECKING:
    from omni_notebook.engine.async_omni import AsyncOmni


def stage(engine: AsyncOmni) -> Any:
    return engine.status().stages[0]


def test_the_same_seed_draws_the_same_and_others_do_not(engine: AsyncOmni) -> None:
    first, again = (asyncio.run(picture(engine)) for _ in range(2))
    assert first == again
    assert first != asyncio.run(picture(engine, params={"seed": 6}))
    assert first != asyncio.run(picture(engine, "a blue circle"))
    assert first != asyncio.run(picture(engine, params={"guidance_scale": 1.0}))
    assert first != asyncio.run(picture(engine, {"prompt": "a red star", "negative_prompt": "blue"}))


def test_parameters_reach_the_pipeline(engine: AsyncOmni, folder: Path) -> None:
    params = {"seed": 9, "num_inference_steps": 3, "guidance_scale": 5.5, "width": 24, "height": 8}
    final = asyncio.run(outputs(engine, "blue", params=params))[-1]
    assert final.images[0].size == (24, 8)
    assert final.images[0].tobytes() == plain(folder, "blue", **params)
    given = asyncio.run(picture(engine, {"prompt": "blue", "negative_prompt": "red"}))
    assert given == plain(folder, "blue", negative_prompt="red")


def test_requests_with_equal_parameters_share_a_batch_and_others_do_not(engine: AsyncOmni) -> None:
    asked = [
        ("a", {}),
        ("b", {"guidance_scale": 1.0}),
        ("c", {"seed": 8}),
        ({"prompt": "d", "negative_prompt": "e"}, {}),
    ]

    async def run() -> list[int]:
        first = await running(engine, request_id="first")
        tasks = []
        for prompt, params in asked:
            tasks.append(asyncio.create_task(outputs(engine, prompt, params=params)))
            await until(lambda: stage(engine).queued == len(tasks))
        await engine.abort("first")
        await first
        return [(await task)[-1].metrics["batch_size"] for task in tasks]

    assert asyncio.run(run()) == [2, 1, 2, 1]


ODD = ("", "  ", 7, {"text": "a"}, {"prompt": ["a"]}, {"prompt": "a", "negative_prompt": 3})


@pytest.mark.parametrize("prompt", ODD)
def test_an_odd_prompt_is_refused_before_anything_starts(engine: AsyncOmni, prompt: Any) -> None:
    with pytest.raises(ArgumentError, match="nothing was started"):
        asyncio.run(outputs(engine, prompt))


def test_a_size_that_the_pipeline_refuses_ends_that_request_alone_in_one_line(engine: AsyncOmni) -> None:
    with pytest.raises(ArgumentError, match=r"StableDiffusionPipeline refused the request: .*divisible by 8") as caught:
        asyncio.run(outputs(engine, params={"width": 13, "height": 16}))
    assert "\n" not in str(caught.value)
    with pytest.raises(ArgumentError, match="at least one pixel"):
        asyncio.run(outputs(engine, params={"height": 0, "width": 16}))
    with pytest.raises(ArgumentError, match="give both"):  # the pipeline would take its own size, and say nothing
        asyncio.run(outputs(engine, params={"width": 8}))
    assert len(asyncio.run(picture(engine))) == 16 * 16 * 3


def test_an_abort_stops_the_batch_at_its_next_step(engine: AsyncOmni) -> None:
    async def run() -> list[Any]:
        task = await running(engine, request_id="long")
        assert await engine.abort("long")
        ended = await task
        await until(lambda: stage(engine).running == 0, 5.0)
        return ended

    golden = asyncio.run(picture(engine))
    ended = asyncio.run(run())
    assert (ended[-1].state, ended[-1].images) == ("aborted", [])
    assert asyncio.run(picture(engine)) == golden


def test_a_batch_of_which_one_is_still_wanted_goes_on(engine: AsyncOmni) -> None:
    async def run() -> tuple[Any, Any]:
        first = await running(engine)
        pair = [asyncio.create_task(outputs(engine, request_id=name, params={"seed": 1})) for name in ("kept", "gone")]
        await until(lambda: stage(engine).queued == 2)
        await engine.abort("gone")
        for task in list(engine._core._flows):
            if task not in {"kept", "gone"}:
                await engine.abort(task)
        await first
        return [await task for task in pair]

    kept, gone = asyncio.run(run())
    assert (kept[-1].state, gone[-1].state) == ("finished", "aborted")


# ----------------------------------------------------------------------------------------- pauses


def test_keep_then_sleep_wake_resume_draws_what_waited(engine: AsyncOmni) -> None:
    async def run(level: int) -> tuple[bytes, bytes]:
        golden = await picture(engine)
        begun = asyncio.create_task(outputs(engine, params={"num_inference_steps": 30}))
        await until(lambda: stage(engine).running == 1)
        waiting = asyncio.create_task(picture(engine))
        await until(lambda: stage(engine).queued == 1)
        await engine.pause_generation(mode="keep")
        assert (stage(engine).pause_state, stage(engine).running, stage(engine).queued) == ("PAUSED", 0, 1)
        assert (await begun)[-1].state == "finished"  # its batch ended: a request is not cut in two
        (ack,) = await engine.sleep([0], level=level)
        assert ack.status == "SUCCESS"
        assert not waiting.done()
        await engine.wake_up([0])
        assert not waiting.done()
        await engine.resume_generation()
        return golden, await waiting

    for level in (1, 2):
        golden, later = asyncio.run(run(level))
        assert later == golden


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_pauses_that_are_not_keep_close_the_front_door_alone(engine: AsyncOmni, mode: str) -> None:
    async def run() -> str:
        task = asyncio.create_task(outputs(engine, params={"num_inference_steps": 30}))
        await until(lambda: stage(engine).running == 1)
        await engine.pause_generation(mode=mode)
        with pytest.raises(PausedError):
            await outputs(engine, admission_timeout=0.0)
        await engine.resume_generation()
        return (await task)[-1].state

    assert asyncio.run(run()) == "finished"  # as the specification says of diffusion stages


def test_a_busy_stage_does_not_sleep_unless_told_how(engine: AsyncOmni) -> None:
    async def run() -> None:
        task = await running(engine)
        with pytest.raises(StageBusyError):
            await engine.sleep([0])
        (ack,) = await engine.sleep([0], mode="abort")
        assert ack.status == "SUCCESS"
        assert (await task)[-1].state == "aborted"
        with pytest.raises(AsleepError):
            await outputs(engine, admission_timeout=0.0)

    asyncio.run(run())


def test_request_events_tell_when_it_waits_how_far_it_is_and_when_it_ends(engine: AsyncOmni) -> None:
    async def run(steps: int, *, abort: bool = False) -> list[tuple[str, float | None]]:
        seen: list[tuple[str, float | None]] = []
        name = f"told-{steps}-{abort}"

        async def listen() -> None:
            async for event in engine.subscribe():
                if getattr(event, "request_id", None) == name:
                    seen.append((str(event.state), event.progress))
                    if abort and event.progress is not None:
                        await engine.abort(name)
                    if event.state in {"finished", "aborted"}:
                        return

        listening = asyncio.create_task(listen())
        await asyncio.sleep(0)
        await outputs(engine, request_id=name, params={"num_inference_steps": steps})
        await asyncio.wait_for(listening, 10)
        return seen

    assert asyncio.run(run(1)) == [("waiting", None), ("finished", None)]
    quarters = [("running", share / 4) for share in (1, 2, 3)]
    assert asyncio.run(run(4)) == [("waiting", None), *quarters, ("finished", None)]
    tenths = [("running", share / 10) for share in range(1, 10)]
    assert asyncio.run(run(40)) == [("waiting", None), *tenths, ("finished", None)]
    aborted = asyncio.run(run(400, abort=True))
    assert (aborted[1], aborted[-1]) == (("running", 0.1), ("aborted", None))
    assert len(aborted) < 6


# ------------------------------------------------------------------------------------ new weights


def test_new_weights_from_another_pipelines_folder(engine: AsyncOmni, folder: Path, other: Path) -> None:
    before, version = asyncio.run(picture(engine)), stage(engine).weight_version
    asyncio.run(engine.load_weights(0, str(other), version="step-2"))
    final = asyncio.run(outputs(engine))[-1]
    assert final.images[0].tobytes() == plain(other) != before
    assert (final.weight_version, stage(engine).weight_version) == ("step-2", "step-2")
    for level in (1, 2):  # what a wake brings back are the new ones
        asyncio.run(engine.sleep([0], level=level))
        asyncio.run(engine.wake_up([0]))
        assert asyncio.run(picture(engine)) == plain(other)
    asyncio.run(engine.load_weights(0, str(folder)))
    assert (asyncio.run(picture(engine)), stage(engine).weight_version) == (before, version)


def _narrow(folder: Path) -> None:
    file = folder / UNET_FILE
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("to_k.weight"))
    save_file({**tensors, name: torch.zeros(3, 3)}, file, metadata={"format": "pt"})


def _lacking(folder: Path) -> None:
    file = folder / UNET_FILE
    save_file(dict(list(load_file(file).items())[1:]), file, metadata={"format": "pt"})


SPOILED = {
    "shape": (_narrow, r"to_k.weight has shape \(3, 3\), the model needs \(64, 64\)"),
    "missing tensor": (_lacking, "has shape nothing, the model needs"),
    "missing component": (lambda folder: edit_json(folder / "model_index.json", vae=None), "lacks the component vae"),
    "no file": (lambda folder: (folder / UNET_FILE).unlink(), "neither diffusion_pytorch_model.safetensors nor"),
    "cut short": (
        lambda folder: (folder / UNET_FILE).write_bytes((folder / UNET_FILE).read_bytes()[:-9]),
        "not a whole safetensors file",
    ),
    "another scale": (
        lambda folder: edit_json(folder / "vae/config.json", scaling_factor=0.5),
        "scaling_factor=0.5, the model that was loaded has 0.18215",
    ),
    "no index": (lambda folder: (folder / "model_index.json").unlink(), "model_index.json: no such file"),
}


@pytest.mark.parametrize("trouble", SPOILED)
def test_new_weights_that_do_not_fit_change_nothing(
    engine: AsyncOmni, other: Path, tmp_path: Path, trouble: str
) -> None:
    spoil, message = SPOILED[trouble]
    spoiled = Path(shutil.copytree(other, tmp_path / "spoiled"))
    spoil(spoiled)
    golden, version = asyncio.run(picture(engine)), stage(engine).weight_version
    with pytest.raises(ConfigError, match=message) as caught:
        asyncio.run(engine.load_weights(0, str(spoiled)))
    assert "\n" not in str(caught.value)
    assert "nothing changed, stage 0 is AWAKE" in str(caught.value)
    assert (asyncio.run(picture(engine)), stage(engine).weight_version) == (golden, version)


def test_weights_without_a_folder_are_refused_with_what_to_do(engine: AsyncOmni, folder: Path) -> None:
    golden = asyncio.run(picture(engine))
    with pytest.raises(UnsupportedError, match=r"save_pretrained\(folder\) and give the folder. Nothing changed"):
        asyncio.run(engine.load_weights(0, load_file(folder / UNET_FILE)))
    assert (stage(engine).state, asyncio.run(picture(engine))) == ("AWAKE", golden)


def test_a_restart_comes_up_with_the_last_weights(in_process: AsyncOmni, other: Path) -> None:
    asyncio.run(in_process.load_weights(0, str(other), version="new"))
    asyncio.run(in_process.restart(0))
    assert (asyncio.run(picture(in_process)), stage(in_process).weight_version) == (plain(other), "new")


def test_a_rank_that_is_killed_fails_its_stage_and_restart_revives_it(child: AsyncOmni) -> None:
    async def run() -> None:
        golden = await picture(child)
        task = await running(child)
        os.kill(stage(child).ranks[0].pid, signal.SIGKILL)
        with pytest.raises(OmniError, match="rank 0"):
            await task
        await until(lambda: stage(child).state == "FAILED")
        await child.restart(0)
        assert (stage(child).state, await picture(child)) == ("AWAKE", golden)

    asyncio.run(run())
