"""Runs a Llama-family decoder: prefill and decode over a static KV cache in the pool."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from omni_notebook.memory.base import KV_CACHE
from omni_notebook.models.decoder import Decoder, DecoderConfig
from omni_notebook.models.loaders import checkpoint_files, read_config
from omni_notebook.models.parallel import SOLO
from omni_notebook.models.tokenizer import PlanGrammar
from omni_notebook.worker.batches import ArBatch, SequenceAnswer, SequenceStep
from omni_notebook.worker.model_runner import ModelRunner, torch_dtype
from omni_notebook.worker.sampling import pick_token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_notebook.config import StageConfig
    from omni_notebook.memory.base import MemoryPool
    from omni_notebook.models.parallel import TensorParallel


class ArRunner(ModelRunner):
    """A decoder, its KV cache and, where the folder has one, its output grammar."""

    _model: Decoder

    def __init__(self, config: StageConfig, parallel_size: int = 1) -> None:
        folder = Path(config.model)
        self._shape = DecoderConfig.from_hf(read_config(folder))
        self._shape.check_parallel(parallel_size)
        self._slots = config.max_num_seqs
        self._max_len = min(config.max_model_len or self._shape.max_positions, self._shape.max_positions)
        self._grammar = PlanGrammar.find(folder)
        self._grammar_state: dict[int, int] = {}
        self._config = config

    def build(self, pool: MemoryPool, parallel: TensorParallel = SOLO) -> None:
        """The decoder, or this rank's part of it, in the pool; the KV cache of its heads beside it."""
        dtype = torch_dtype(self._config.dtype, pool.device, lambda: checkpoint_files(self._config.model))
        self._place(lambda: Decoder(self._shape, parallel), dtype, pool)
        self._kv = pool.empty(self._shape.kv_shape(self._slots, self._max_len, parallel.size), dtype, KV_CACHE)
        self._decode = self._graphed(self._run, self._config)

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self._model(tokens, positions, self._kv, slots)
        return states

    @torch.inference_mode()
    def execute(self, batch: ArBatch, weight_version: Callable[[], str]) -> list[SequenceAnswer]:  # noqa: ARG002
        """One step: each prefill by itself, all decodes together; answers in the batch's order."""
        hidden: dict[int, torch.Tensor] = {}
        decodes = [s for s in batch.sequences if len(s.token_ids) == 1 and s.start > 0]
        for step in batch.sequences:
            if step not in decodes:
                hidden[step.slot] = self._forward([step])[0]
        if decodes:
            for step, states in zip(decodes, self._forward(decodes), strict=True):
                hidden[step.slot] = states
        return [self._answer(step, hidden[step.slot]) for step in batch.sequences]

    def _forward(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        tokens = self._longs([s.token_ids for s in steps])
        positions = self._longs([range(s.start, s.start + len(s.token_ids)) for s in steps])
        slots = self._longs([s.slot for s in steps])
        with self.loras.applied([s.lora_id for s in steps]) as adapted:
            run = self._run if adapted or tokens.shape[1] > 1 else self._decode
            return run(tokens, positions, slots)

    def _longs(self, numbers: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self._device)

    def _answer(self, step: SequenceStep, states: torch.Tensor) -> SequenceAnswer:
        token = pick_token(self._model.logits(states[-1]).cpu(), step, self._allowed(step))
        fresh = states[max(step.prompt_len - 1 - step.start, 0) :]
        return SequenceAnswer(token_id=token, hidden=fresh.float().cpu().numpy().copy() if step.want_hidden else None)

    def _allowed(self, step: SequenceStep) -> list[int] | None:
        if self._grammar is None:
            return None
        state = self._grammar.start if step.start == 0 else self._grammar_state[step.slot]
        for token in step.token_ids[max(step.prompt_len - step.start, 0) :]:
            state = self._grammar.advance(state, token)
        self._grammar_state[step.slot] = state
        return self._grammar.allowed(state)
