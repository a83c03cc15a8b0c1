"""What a DiT's images are drawn from, on the device: fetched ahead by a thread, or with the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from omni_notebook.models.flow import Condition
from omni_notebook.worker.prefetching import Prefetcher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.models.dit import DiTConfig
    from omni_notebook.worker.batches import ImageCondition, ImageStep, Prefetch


class OneCondition(NamedTuple):
    """One image's: plan_ids (P,) long, hidden (P, hidden size) in the model's type or None."""

    plan_ids: torch.Tensor
    hidden: torch.Tensor | None


class Conditioner:
    """Makes conditions for batches; `prefetch` may be called by any thread."""

    def __init__(self, shape: DiTConfig) -> None:
        self._shape = shape
        self._device, self._dtype = "cpu", torch.float32
        self._ahead: Prefetcher[OneCondition] = Prefetcher()

    def place(self, device: str, dtype: torch.dtype) -> None:
        """Say where the model is, and its type; before anything is fetched."""
        self._device, self._dtype = device, dtype

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor where the model is, in its type."""
        return tensor.to(self._device, self._dtype)

    def prefetch(self, wanted: Prefetch) -> None:
        """Begin to move conditioning to the device."""
        self._ahead.keep(wanted.keep)
        for key, condition in wanted.conditions.items():
            self._ahead.fetch(key, lambda condition=condition: self._load(condition))  # type: ignore[misc]

    @torch.inference_mode()
    def _load(self, condition: ImageCondition) -> OneCondition:
        plan_ids = torch.tensor(condition.plan_ids, dtype=torch.long, device=self._device)
        if condition.hidden is None:
            return OneCondition(plan_ids, None)
        hidden = torch.zeros(len(plan_ids), self._shape.cond_hidden_size, dtype=self._dtype)
        rows = np.asarray(condition.hidden)[: len(plan_ids)]
        hidden[: len(rows)] = torch.from_numpy(rows).to(self._dtype)
        return OneCondition(plan_ids, self.placed(hidden))

    def batch(self, images: Sequence[ImageStep]) -> Condition:
        """The whole batch's condition, from what was fetched ahead and what came along."""
        return self.together([self.one(image) for image in images])

    def one(self, image: ImageStep) -> OneCondition:
        """One image's condition, from what was fetched ahead or came along."""
        return self._ahead.take(image.key) if image.condition is None else self._load(image.condition)

    def together(self, ones: Sequence[OneCondition]) -> Condition:
        """Several images' condition."""
        plan_ids = torch.stack([one.plan_ids for one in ones])
        if all(one.hidden is None for one in ones):
            return Condition(plan_ids)
        empty = self.placed(torch.zeros(plan_ids.shape[1], self._shape.cond_hidden_size))
        hidden = torch.stack([empty if one.hidden is None else one.hidden for one in ones])
        given = torch.tensor([one.hidden is not None for one in ones], device=self._device)
        return Condition(plan_ids, hidden, given)

    def join(self) -> None:
        """Return once nothing is on its way."""
        self._ahead.join()

    def drop(self) -> None:
        """Hold nothing any more."""
        self._ahead.keep(())

    def close(self) -> None:
        """End the thread."""
        self._ahead.close()
