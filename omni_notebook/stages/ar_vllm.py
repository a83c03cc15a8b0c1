"""The autoregressive stage on vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_notebook.errors import ArgumentError
from omni_notebook.models.tokenizer import GRAMMAR_FILE, TextTokenizer
from omni_notebook.stages.vllm_scheduler import TextPrompt, VllmScheduler

if TYPE_CHECKING:
    from omni_notebook.config import StageConfig
    from omni_notebook.protocol import OmniSamplingParams
    from omni_notebook.stages.lora import StageLoras
    from omni_notebook.stages.requests import StageOutput
    from omni_notebook.transport.connector import Connector


class ArVllmModel:
    """Text (or token ids) in, text out; vLLM has the tokenizer, but for a folder of ours, whose rules it lacks."""

    output_type = "text"

    def __init__(self, config: StageConfig) -> None:
        folder = Path(config.model)
        ours = (folder / GRAMMAR_FILE).is_file()
        self._tokenizer = TextTokenizer.load(folder) if ours else None

    @property
    def adaptable(self) -> dict[str, tuple[int, int]]:
        """See `StageModel.adaptable`."""
        return {}

    def make_scheduler(self, connector: Connector | None, loras: StageLoras) -> VllmScheduler:  # noqa: ARG002
        """The books about what vLLM was given."""
        return VllmScheduler(connector, None if self._tokenizer is None else self._tokenizer.decode)

    def check(self, params: OmniSamplingParams) -> None:
        """Every valid parameter can be followed."""

    def first(self, prompt: Any, params: OmniSamplingParams) -> TextPrompt:  # noqa: ARG002  (same shape for all kinds)
        """A string, or `{"prompt_token_ids": [...]}`."""
        if isinstance(prompt, str):
            if not prompt.strip():
                msg = "the prompt is empty; nothing was started"
                raise ArgumentError(msg)
            return TextPrompt(prompt if self._tokenizer is None else tuple(self._tokenizer.encode(prompt)))
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        if not isinstance(ids, list | tuple) or not ids or not all(isinstance(i, int) and i >= 0 for i in ids):
            msg = 'a prompt is a string or {"prompt_token_ids": [ints]}; nothing was started'
            raise ArgumentError(msg)
        return TextPrompt(tuple(ids))

    def following(self, upstream: StageOutput, params: OmniSamplingParams) -> TextPrompt:
        """The text of the stage before."""
        return self.first(upstream.text, params)
