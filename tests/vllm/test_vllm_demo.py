"""The demo with its thinker on vLLM: the same plans, pictures at the end, and a kernel that knows nothing of vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

import omni_notebook as omni
from omni_notebook.config import OFFLOADING
from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.errors import ArgumentError, ConfigError, UnsupportedError
from tests.engine.engine_helpers import PARAMS, collect, golden

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from omni_notebook.protocol import OmniRequestOutput

PROMPTS = (
    "a red star above a blue circle",
    "two blue squares",
    "a pink heart with a red star to its left",
    "draw a yellow cross in the middle, please",
    "a green triangle below a white circle and a red square on the right",
)


async def plans(engine: AsyncOmni) -> list[tuple[list[int], str]]:
    last: list[OmniRequestOutput] = [
        (await collect(engine, prompt, output_modalities="text"))[-1] for prompt in PROMPTS
    ]
    return [(out.outputs[0].token_ids, out.text) for out in last]


def test_both_runtimes_write_the_same_plans_token_for_token(demo: AsyncOmni) -> None:
    with AsyncOmni("demo") as ours:
        expected = asyncio.run(plans(ours))
    assert asyncio.run(plans(demo)) == expected
    assert [stage.runtime for stage in demo.status().stages] == ["vllm", "torch"]


def test_several_at_once_write_what_each_writes_alone(demo: AsyncOmni) -> None:
    async def at_once() -> list[str]:
        outs = await asyncio.gather(*(collect(demo, prompt, output_modalities="text") for prompt in PROMPTS))
        return [out[-1].text for out in outs]

    assert asyncio.run(at_once()) == [text for _, text in asyncio.run(plans(demo))]


@pytest.mark.parametrize("levels", [(1, 2), (2, 1)])
def test_the_picture_is_the_same_after_both_stages_slept(demo: AsyncOmni, levels: tuple[int, int]) -> None:
    async def scenario() -> None:
        before = await golden(demo)
        for stage_id, level in enumerate(levels):
            acks = await demo.sleep([stage_id], level=level)
            assert [ack.status for ack in acks] == ["SUCCESS"]
        assert [ack.status for ack in await demo.wake_up()] == ["SUCCESS"] * 2
        assert await golden(demo) == before

    asyncio.run(scenario())


async def in_mid_plan(engine: AsyncOmni, prompt: str) -> AsyncIterator[OmniRequestOutput]:
    """A request that has some of its tokens; all is paused."""
    for _ in range(20):
        news = engine.generate(prompt, sampling_params=PARAMS, output_modalities="text")
        await anext(news)
        await engine.pause_generation(mode="keep")
        if engine.status().stages[0].running:
            return news
        await engine.resume_generation()
    pytest.fail("every plan was whole before the pause")


def test_a_restart_in_mid_plan_ends_in_the_same_plan(demo: AsyncOmni) -> None:
    async def scenario() -> None:
        whole = (await collect(demo, PROMPTS[-1], output_modalities="text"))[-1]
        news = await in_mid_plan(demo, PROMPTS[-1])
        await demo.restart(0)
        await demo.resume_generation()
        last = [out async for out in news][-1]
        assert (last.outputs[0].token_ids, last.text) == (whole.outputs[0].token_ids, whole.text)

    asyncio.run(scenario())


def test_an_audit_of_the_vllm_stage_passes(demo: AsyncOmni) -> None:
    report = omni.audit(demo, [0], level=2, cycles=2, prompt=PROMPTS[0], sampling_params={"num_inference_steps": 3})
    assert report.verdict == "PASS", report


def test_bad_requests_end_alone(demo: AsyncOmni) -> None:
    async def scenario() -> None:
        before = await plans(demo)
        with pytest.raises(ArgumentError, match="empty"):
            await collect(demo, " ", output_modalities="text")
        with pytest.raises(Exception, match=r"(?i)vocab|token id"):
            await collect(demo, {"prompt_token_ids": [10**6]}, output_modalities="text")
        with pytest.raises(Exception, match=r"(?i)length|longer|exceed"):
            await collect(demo, {"prompt_token_ids": [5] * 300}, output_modalities="text")
        assert await plans(demo) == before

    asyncio.run(scenario())


@pytest.mark.parametrize("ids", [[True], [2**63], [2**64], [10**30]], ids=str)
def test_ids_that_no_vocabulary_has_are_refused_before_vllm_is_asked(demo: AsyncOmni, ids: list[int]) -> None:
    with pytest.raises(ArgumentError, match="a prompt is a string or"):
        asyncio.run(collect(demo, {"prompt_token_ids": ids}, output_modalities="text"))


def test_a_request_that_can_not_be_sent_ends_alone(demo: AsyncOmni) -> None:
    async def scenario() -> None:
        before = await plans(demo)
        unsendable = {"stop_token_ids": [10**30]}
        ends = await asyncio.gather(
            collect(demo, PROMPTS[0], output_modalities="text"),
            collect(demo, PROMPTS[1], output_modalities="text", sampling_params=unsendable),
            collect(demo, "half a pair \ud800", output_modalities="text"),
            collect(demo, PROMPTS[2], output_modalities="text"),
            return_exceptions=True,
        )
        assert isinstance(ends[1], ArgumentError)
        assert "vLLM was not asked" in str(ends[1])
        texts = [end[-1].text for end in ends if not isinstance(end, BaseException)]
        assert texts[::2] == [before[0][1], before[2][1]]
        assert str(demo.status().stages[0].state) == "AWAKE"
        assert await plans(demo) == before

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runtime": "vllm", "stage_overrides": {1: {"runtime": "vllm"}}}, "runs 'ar' stages"),
        ({"stage_overrides": {0: {"runtime": "vllm", "executor": "uni"}}}, "processes of its own"),
        ({"engine_args": {"enforce_eager": True}}, "engine_args are for runtime='vllm'"),
    ],
)
def test_what_can_not_run_on_vllm_is_refused_before_anything_starts(options: dict, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        AsyncOmni("demo", **options)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("max_num_seqs", "use max_num_seqs="),
        ("nnodes", "on this machine"),
        ("prefill_context_parallel_size", "use tensor_parallel_size="),
        ("worker_extension_cls", "set by this package"),
        ("model", "use model="),
        ("kv_transfer_config", "other weights had computed"),
        ("kv_offloading_size", "other weights had computed"),
        ("ec_transfer_config", "other weights had computed"),
        *((name, "no memory that a sleep moves") for name in OFFLOADING),
    ],
)
def test_engine_args_do_not_take_what_is_the_stage_s(key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AsyncOmni("demo", stage_overrides={0: {"runtime": "vllm", "engine_args": {key: "x"}}})


@pytest.mark.parametrize(
    "value", [torch.bfloat16, len, object(), Path(), 2**70, [{"deep": torch.int8}]], ids=lambda one: type(one).__name__
)
def test_engine_args_that_can_not_be_sent_are_refused_and_start_nothing(value: object) -> None:
    children = psutil.Process().children()
    with pytest.raises(ConfigError, match=r"engine_args\['dtype'\]=.* can not be sent to vLLM"):
        AsyncOmni("demo", stage_overrides={0: {"runtime": "vllm", "engine_args": {"dtype": value}}})
    assert psutil.Process().children() == children
