"""Pipelines other than the demo's two stages."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from omni_notebook.config import DEMO_FOLDER, load_pipeline
from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.errors import ArgumentError, ConfigError
from tests.engine.engine_helpers import PARAMS, collect, golden

if TYPE_CHECKING:
    from pathlib import Path

FOUR = """
name: four
stages:
  - {name: thinker, model: demo/thinker}
  - {name: editor, model: demo/thinker}
  - {name: painter, model: demo/dit}
  - {name: second painter, model: demo/dit, ballast_bytes: 8MiB}
"""


def test_text_stages_feed_each_other_and_every_painter_draws_the_last_plan(tmp_path: Path) -> None:
    file = tmp_path / "four.yaml"
    file.write_text(FOUR)

    async def run(engine: AsyncOmni) -> None:
        outputs = await collect(engine)
        ends = [o for o in outputs if o.state == "finished"]
        assert [(o.stage_id, o.finished) for o in ends] == [(0, False), (1, False), (2, False), (3, True)]
        pictures = [o.images[0].tobytes() for o in ends if o.images]
        assert len(pictures) == 2
        assert pictures[0] == pictures[1]
        acks = await engine.sleep(level=2)
        assert [(a.stage_id, a.status) for a in acks] == [(n, "SUCCESS") for n in range(4)]
        await engine.wake_up()
        again = await collect(engine)
        assert [o.images[0].tobytes() for o in again if o.images] == pictures
        image = await collect(engine, output_modalities=["image"])
        assert image[-1].stage_id == 2

    with AsyncOmni(file) as engine:
        asyncio.run(run(engine))


def test_a_painter_by_itself_draws_a_plan_and_refuses_other_text() -> None:
    async def run(engine: AsyncOmni) -> None:
        outputs = await collect(engine, "red star top center; blue circle bottom center")
        assert outputs[-1].images
        with pytest.raises(ArgumentError, match="is not a scene plan"):
            await collect(engine, "a red star")

    with AsyncOmni(DEMO_FOLDER / "dit") as engine:
        asyncio.run(run(engine))


def test_a_thinker_by_itself_writes_text() -> None:
    async def run(engine: AsyncOmni) -> None:
        last = (await collect(engine))[-1]
        assert (last.final_output_type, last.text) == ("text", "red star top center; blue circle bottom center")

    with AsyncOmni(DEMO_FOLDER / "thinker") as engine:
        asyncio.run(run(engine))


def test_the_painter_uses_the_thinkers_hidden_states_and_draws_right_without(tmp_path: Path) -> None:
    async def run(engine: AsyncOmni) -> bytes:
        return (await golden(engine))[1]

    async def alone(engine: AsyncOmni) -> bytes:
        plan = "red star top center; blue circle bottom center"
        return (await collect(engine, plan, sampling_params=PARAMS))[-1].images[0].tobytes()

    with AsyncOmni("demo") as engine, AsyncOmni(DEMO_FOLDER / "dit") as painter:
        assert asyncio.run(run(engine)) != asyncio.run(alone(painter))


BAD = [
    ("stages: []", "at least one stage"),
    ("steps: 3", "unknown key 'steps'"),
    ("stages: [{model: demo/dit}, {model: demo/thinker}]", "can not follow"),
    ("stages: [{model: demo/dit, colour: red}]", "stages\\[0\\]: unknown key 'colour'"),
    ("stages: [{kind: ar}]", "'model' is missing"),
    ("stages: [{model: nowhere}]", "is not a model folder"),
    ("stages: [{model: demo/dit, max_batch_size: 0}]", "max_batch_size=0"),
    ("stages: [{model: demo/dit, name: '1'}]", "name='1' is how people say which number"),
    ("stages: [{model: demo/dit, name: all}]", "name='all' is how people say"),
    ("stages: [{model: demo/dit, ballast_bytes: lots}]", "is not a size"),
    ("stages: {a: 1}", "'stages' is a list"),
    ("- just\n- a list", "mapping with the key 'stages'"),
    ("stages: [", "not a readable pipeline file"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[m for _, m in BAD])
def test_a_wrong_pipeline_file_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_pipeline(file)
    assert "\n" not in str(caught.value)
