"""The stand-in package on the path for a test, and an engine over it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from omni_notebook.protocol import LoRARequest
from tests.engine.upstream.upstream_helpers import started

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_notebook.engine.upstream.engine import UpstreamOmni

FAKE = Path(__file__).with_name("fake_vllm_omni")


def _theirs() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] in {"vllm", "vllm_omni"}]


@pytest.fixture(scope="module")
def package() -> Iterator[None]:
    """`import vllm_omni` finds the stand-in."""
    kept = {name: sys.modules.pop(name) for name in _theirs()}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FAKE))
        yield
        from vllm_omni.engine import process

        process.close_all()
    for name in _theirs():
        del sys.modules[name]
    sys.modules.update(kept)


@pytest.fixture
def engine(package: None) -> Iterator[UpstreamOmni]:
    """Two stages: an engine core of one rank, a diffusion stage of two; 24 MiB a rank."""
    with started(tensor_parallel_size=2) as engine:
        yield engine


@pytest.fixture
def style() -> LoRARequest:
    """An adapter."""
    return LoRARequest("style", 3, "/adapters/style")
