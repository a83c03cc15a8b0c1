"""Picking the next token from logits; stateless, so that a recomputed sequence draws the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.worker.batches import SequenceStep

_MIX = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads (seed, position) over all 64 bits
_MASK = 2**63 - 1


def pick_token(logits: torch.Tensor, step: SequenceStep, allowed: Sequence[int] | None) -> int:
    """The next token id of a sequence from `logits` (vocab,), greedy at temperature 0.

    `allowed` masks all other ids. The draw depends on the step's seed and end position alone.
    Nucleus sampling: Holtzman et al.
    2020, "The Curious Case of Neural Text Degeneration".
    """
    scores = logits.float()
    if allowed is not None:
        mask = torch.full_like(scores, float("-inf"))
        mask[list(allowed)] = 0.0
        scores = scores + mask
    if step.temperature == 0.0:
        return int(scores.argmax())
    scores = (scores - scores.max()) / step.temperature  # at most 0: no overflow, however small the temperature
    probabilities = _cut(torch.softmax(scores, dim=-1), step.top_p, step.top_k)
    position = step.start + len(step.token_ids)
    generator = torch.Generator().manual_seed((step.seed * _MIX + position * 2 + 1) & _MASK)
    return int(torch.multinomial(probabilities.cpu(), 1, generator=generator))


def _cut(probabilities: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    if top_p >= 1.0 and top_k <= 0:
        return probabilities
    ordered, order = probabilities.sort(descending=True)
    keep = ordered.cumsum(-1) - ordered < top_p
    if top_k > 0:
        keep[top_k:] = False
    return torch.zeros_like(probabilities).scatter(0, order, torch.where(keep, ordered, 0.0))
