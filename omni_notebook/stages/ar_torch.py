"""The autoregressive stage on our own decoder."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_notebook.errors import ArgumentError
from omni_notebook.models.decoder import Decoder, DecoderConfig
from omni_notebook.models.loaders import read_config
from omni_notebook.models.lora import shapes
from omni_notebook.models.tokenizer import TextTokenizer
from omni_notebook.stages.ar_scheduler import ArPrompt, ArScheduler

if TYPE_CHECKING:
    from omni_notebook.config import StageConfig
    from omni_notebook.protocol import OmniSamplingParams
    from omni_notebook.stages.lora import StageLoras
    from omni_notebook.stages.requests import StageOutput
    from omni_notebook.transport.connector import Connector


class ArTorchModel:
    """Text (or token ids) in, text out."""

    output_type = "text"
    unadaptable: str | None = None

    def __init__(self, config: StageConfig) -> None:
        folder = Path(config.model)
        shape = DecoderConfig.from_hf(read_config(folder))
        shape.check_parallel(config.tensor_parallel_size)
        self._shape = shape
        self._slots = config.max_num_seqs
        self._max_len = min(config.max_model_len or shape.max_positions, shape.max_positions)
        self._vocab_size = shape.vocab_size
        self._tokenizer = TextTokenizer.load(folder)

    @functools.cached_property
    def adaptable(self) -> dict[str, tuple[int, int]]:
        """See `StageModel.adaptable`."""
        return shapes(lambda: Decoder(self._shape))

    def make_scheduler(self, connector: Connector | None, loras: StageLoras) -> ArScheduler:
        """Continuous batching over the configured slots."""
        return ArScheduler(
            slots=self._slots, max_len=self._max_len, tokenizer=self._tokenizer, connector=connector, loras=loras
        )

    def check(self, params: OmniSamplingParams) -> None:
        """Every valid parameter can be followed."""

    def first(self, prompt: Any, params: OmniSamplingParams) -> ArPrompt:  # noqa: ARG002  (same shape for all kinds)
        """Token ids of a string, or of `{"prompt_token_ids": [...]}`."""
        ids = self._token_ids(prompt)
        if len(ids) >= self._max_len:
            msg = f"the prompt has {len(ids)} tokens; this model takes at most {self._max_len - 1}. Nothing was started"
            raise ArgumentError(msg)
        return ArPrompt(tuple(ids))

    def _token_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if not prompt.strip():
                msg = "the prompt is empty; nothing was started"
                raise ArgumentError(msg)
            return self._tokenizer.encode(prompt)
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        if not isinstance(ids, list | tuple) or not ids or not all(isinstance(i, int) for i in ids):
            msg = 'a prompt is a string or {"prompt_token_ids": [ints]}; nothing was started'
            raise ArgumentError(msg)
        wrong = next((i for i in ids if not 0 <= i < self._vocab_size), None)
        if wrong is not None:
            msg = f"prompt_token_ids holds {wrong}; this model knows 0 … {self._vocab_size - 1}. Nothing was started"
            raise ArgumentError(msg)
        return list(ids)

    def following(self, upstream: StageOutput, params: OmniSamplingParams) -> ArPrompt:
        """Nothing feeds an AR stage; `PipelineConfig` refuses such a pipeline."""
        return self.first(upstream.text, params)
