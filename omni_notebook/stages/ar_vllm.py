"""The autoregressive stage on vLLM."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_notebook.config import GRAMMAR_FILE
from omni_notebook.errors import ArgumentError
from omni_notebook.models.loaders import shapes_of
from omni_notebook.models.tokenizer import TextTokenizer, printable
from omni_notebook.models.vllm_folders import files_that_vllm_reads, folder_of
from omni_notebook.stages.vllm_scheduler import TextPrompt, VllmScheduler

if TYPE_CHECKING:
    from omni_notebook.config import StageConfig
    from omni_notebook.protocol import OmniSamplingParams
    from omni_notebook.stages.lora import StageLoras
    from omni_notebook.stages.requests import StageOutput
    from omni_notebook.transport.connector import Connector


_IDS = 2**31
"""Above every id that a vocabulary can have."""
_ADAPTED = ("_proj.weight",)
"""Which layers vLLM adapts in every causal language model: projections of attention and of the feed-forward part."""


class ArVllmModel:
    """Text (or token ids) in, text out; vLLM has the tokenizer, but for a folder of ours, whose rules it lacks."""

    output_type = "text"
    unadaptable: str | None = None

    def __init__(self, config: StageConfig) -> None:
        ours = (Path(config.model) / GRAMMAR_FILE).is_file()
        self._config = config
        self._tokenizer = TextTokenizer.load(config.model) if ours else None

    @functools.cached_property
    def adaptable(self) -> dict[str, tuple[int, int]]:
        """See `StageModel.adaptable`; none where vLLM was not started with `enable_lora`, else vLLM has the files."""
        arguments = self._config.engine_args
        if not arguments.get("enable_lora"):
            return {}
        folder = folder_of(self._config.model, revision=arguments.get("revision"), cache=arguments.get("download_dir"))
        found = {name: shape for name, (_, shape) in shapes_of(files_that_vllm_reads(folder, "hf")).items()}
        return {
            name.removesuffix(".weight"): (shape[0], shape[1])
            for name, shape in found.items()
            if len(shape) == 2 and name.endswith(_ADAPTED)
        }

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
            return TextPrompt(printable(prompt) if self._tokenizer is None else tuple(self._tokenizer.encode(prompt)))
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        if not isinstance(ids, list | tuple) or set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= _IDS:
            msg = 'a prompt is a string or {"prompt_token_ids": [ints]}; nothing was started'
            raise ArgumentError(msg)
        return TextPrompt(tuple(ids))

    def following(self, upstream: StageOutput, params: OmniSamplingParams) -> TextPrompt:
        """The text of the stage before."""
        return self.first(upstream.text, params)
