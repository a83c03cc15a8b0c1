"""The calls of `AsyncOmni` that concern LoRA adapters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from omni_notebook.protocol import LoRARequest

T = TypeVar("T")


class Known(Protocol):
    """What knows the adapters that are there."""

    def known(self) -> Any:
        """Their ids, in order, to be gone through."""


class LoRACore(Protocol):
    """The part of an engine's core that carries them out, on the engine's loop."""

    @property
    def loras(self) -> Known:
        """The adapters."""

    async def add_lora(self, request: Any, stage_ids: Any, timeout: float | None) -> bool:
        """See `LoRACalls.add_lora`."""

    async def remove_lora(self, lora_int_id: Any, timeout: float | None) -> bool:
        """See `LoRACalls.remove_lora`."""

    async def pin_lora(self, lora_int_id: Any, timeout: float | None) -> bool:
        """See `LoRACalls.pin_lora`."""


class LoRACalls(ABC):
    """Adding, removing, pinning and listing, from any loop and thread."""

    @property
    @abstractmethod
    def _adapters(self) -> LoRACore:
        """The engine's core."""

    @abstractmethod
    async def _run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run on the engine's loop."""

    async def add_lora(
        self, request: LoRARequest, stage_ids: Sequence[int] | int | None = None, timeout: float | None = None
    ) -> bool:
        """Add a LoRA adapter in peft's format to all ranks of the stages that it fits; whether it was not there yet.

        Args:
            request: its name, its number and its folder; a later `generate(lora_request=...)` names it.
            stage_ids: None = every stage that has the layers which it names, in their shapes.
            timeout: seconds.

        Raises:
            ArgumentError: unknown stage, or another adapter has this name or number.
            ConfigError: it is broken, not supported or does not fit; names the file and what is wrong with it.
            StageBusyError, PauseError, AsleepError, NeedsWeightsError, StageFailedError: refused, nothing changed.
            LoRAError: a rank could not take it; it was removed from all.
        """
        return await self._run(lambda: self._adapters.add_lora(request, stage_ids, timeout))

    async def remove_lora(self, lora_int_id: int, timeout: float | None = None) -> bool:
        """Remove an adapter from every stage; whether it was there. With the last one its memory goes back.

        Raises:
            StageBusyError: a request that is here names it; likewise refused as by `add_lora`.
        """
        return await self._run(lambda: self._adapters.remove_lora(lora_int_id, timeout))

    async def pin_lora(self, lora_int_id: int, timeout: float | None = None) -> bool:
        """Keep an adapter in one of the `max_loras` slots for good, until it is removed; True.

        Raises:
            ArgumentError: there is no such adapter.
            LoRAError: pinned adapters hold every slot; likewise refused as by `add_lora`.
        """
        return await self._run(lambda: self._adapters.pin_lora(lora_int_id, timeout))

    async def list_loras(self) -> list[int]:
        """The numbers of all adapters, sorted; works in every state. `status().stages[i].loras` has their details."""

        async def run() -> list[int]:
            return list(self._adapters.loras.known())

        return await self._run(run)
