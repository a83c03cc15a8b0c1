"""What the executor of a hosted engine says of a start that failed."""

from __future__ import annotations

from omni_notebook.executors.hosted import _root_cause
from omni_notebook.protocol import RankId

FIRST = RankId(stage_id=0, replica=0, rank=0)


def test_a_torchvision_that_does_not_fit_is_named_with_the_cure():
    printed = ["Traceback (most recent call last):", "RuntimeError: operator torchvision::nms does not exist"]
    said = _root_cause(RuntimeError("Engine core initialization failed. See root cause above."), printed, FIRST)
    assert "operator torchvision::nms does not exist; the torchvision" in said
    assert said.endswith("pip uninstall -y torchvision torchaudio torchcodec. Nothing is left of it")


def test_another_cause_is_told_as_it_is():
    said = _root_cause(RuntimeError("no room"), [], FIRST)
    assert said == "stage 0: vLLM could not start: no room. Nothing is left of it"
