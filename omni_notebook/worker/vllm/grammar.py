"""The demo thinker's plan grammar as a logits processor of vLLM's: every sequence stays a valid plan."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from omni_notebook.models.tokenizer import PlanGrammar
from omni_notebook.worker.vllm.engine import GENERATED

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class PlanGrammarProcessor(LogitsProcessor):
    """Lets each sequence go on only as the grammar in the model's folder allows."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:  # noqa: ARG002
        self._grammar = PlanGrammar.load(vllm_config.model_config.model)
        self._states: dict[int, _Sequence] = {}

    def is_argmax_invariant(self) -> bool:
        """It changes which token is the likeliest."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow vLLM's rows: which sequences came, went and moved."""
        if batch_update is None:
            return
        for index, params, prompt, output in batch_update.added:
            count = (params.extra_args or {}).get(GENERATED, 0)
            generated = prompt[len(prompt) - count :] if prompt else []
            self._states[index] = _Sequence(self._grammar, generated, output)
        for index in batch_update.removed:
            self._states.pop(index, None)
        for one, other, direction in batch_update.moved:
            moved, replaced = self._states.pop(one, None), self._states.pop(other, None)
            if moved is not None:
                self._states[other] = moved
            if direction == MoveDirectionality.SWAP and replaced is not None:
                self._states[one] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Shut out what may not follow; `logits` is (sequences, vocabulary)."""
        for index, sequence in self._states.items():
            allowed = torch.tensor(sequence.allowed(), device=logits.device)
            kept = logits[index, allowed]
            logits[index].fill_(float("-inf"))
            logits[index, allowed] = kept
        return logits


class _Sequence:
    """Where one sequence stands in the grammar; `output` is vLLM's own list, which grows after what came before."""

    def __init__(self, grammar: PlanGrammar, before: list[int], output: list[int]) -> None:
        self._grammar = grammar
        self._output = output
        self._seen = 0
        self._state = functools.reduce(grammar.advance, before, grammar.start)

    def allowed(self) -> Any:
        for token in self._output[self._seen :]:
            self._state = self._grammar.advance(self._state, token)
        self._seen = len(self._output)
        return self._grammar.allowed(self._state)
