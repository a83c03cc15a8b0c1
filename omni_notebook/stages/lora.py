"""The adapters of a stage: which there are, which are pinned, and which requests can run side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from omni_notebook.errors import LoRAError
from omni_notebook.protocol import LoRAStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from omni_notebook.protocol import LoRARequest

LORA_REASON = "lora"
"""What closes a stage's schedulers while its adapters change."""


@dataclass(slots=True)
class Installed:
    """An adapter on every rank of a stage; `digest` is of its files as they were read, `rank` its largest rank."""

    request: LoRARequest
    digest: str
    rank: int
    pinned: bool = False


class StageLoras:
    """A stage's adapters by their ids; each replica has `slots`, so many adapters can be in use there at a time.

    `on_lost` is called for an adapter that was removed, or that a restart could not bring back, with the error for
    requests that name it.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.on_lost: Callable[[LoRARequest, LoRAError], None] = lambda _request, _error: None
        self._installed: dict[int, Installed] = {}

    def __contains__(self, lora_id: int) -> bool:
        return lora_id in self._installed

    def __iter__(self) -> Iterator[Installed]:
        return iter(tuple(self._installed.values()))

    def __getitem__(self, lora_id: int) -> Installed:
        return self._installed[lora_id]

    def put(self, installed: Installed) -> None:
        """It is on every rank now."""
        self._installed[installed.request.lora_int_id] = installed

    def drop(self, lora_id: int) -> None:
        """It is on no rank any more."""
        self._installed.pop(lora_id, None)

    @property
    def pinned(self) -> set[int]:
        """Ids of those that never leave their slots."""
        return {lora_id for lora_id, installed in tuple(self._installed.items()) if installed.pinned}

    def may_start(self, lora_id: int, beside: Iterable[int]) -> bool:
        """Whether a request with this adapter can run beside requests with these (0 = none)."""
        pinned = self.pinned
        if not lora_id or lora_id in pinned:
            return True
        return len({lora_id, *beside} - {0} - pinned) <= self.slots - len(pinned)

    def status(self) -> tuple[LoRAStatus, ...]:
        """What people see."""
        return tuple(
            LoRAStatus(
                lora_name=one.request.lora_name,
                lora_int_id=one.request.lora_int_id,
                lora_path=one.request.lora_path,
                rank=one.rank,
                pinned=one.pinned,
            )
            for one in self
        )


def gone(request: LoRARequest, stage_id: int, why: str = "") -> LoRAError:
    """The error of a request that names an adapter which is not there any more."""
    because = f": {why}" if why else ""
    return LoRAError(
        f"adapter {request.title} is not on stage {stage_id} any more{because}; call add_lora(request), then generate"
    )
