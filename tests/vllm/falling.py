"""A vLLM plugin that makes a step raise: what a bug in a model's code, or of a kernel's, looks like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

WORDS = "a kernel of the model fell over"
FALLS = {"prompt_token_ids": [5] * 11}


def install(folder: Path) -> None:
    """Make it a plugin for those who have `folder` on their path."""
    info = folder / "falling-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: falling\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\nfalling = {__name__}:plugin\n")


def plugin() -> None:
    """Raise in the step that begins a prompt of the length of `FALLS`."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    plain = GPUModelRunner.execute_model

    def execute_model(self: Any, scheduled: Any, *rest: Any, **known: Any) -> Any:
        if any(
            len(new.prompt_token_ids or ()) == len(FALLS["prompt_token_ids"]) for new in scheduled.scheduled_new_reqs
        ):
            raise RuntimeError(WORDS)
        return plain(self, scheduled, *rest, **known)

    GPUModelRunner.execute_model = execute_model
