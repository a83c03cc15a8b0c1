"""The shipped demo models, loaded once. One thread: on a busy machine two wait for each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import demo_diffusion
import demo_judge
import demo_thinker

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "omni_notebook" / "models" / "demo"


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def thinker_folder():
    return DEMO / "thinker"


@pytest.fixture(scope="session")
def dit_folder():
    return DEMO / "dit"


@pytest.fixture(scope="session")
def thinker(thinker_folder):
    return demo_thinker.load(thinker_folder, "cpu")


@pytest.fixture(scope="session")
def dit(dit_folder):
    return demo_diffusion.load(dit_folder, "cpu")


@pytest.fixture(scope="session")
def judge():
    return demo_judge.load(ROOT / "tests" / "data" / "judge.safetensors")
