"""The calls of `RemoteOmni` that concern LoRA adapters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeVar

from omni_notebook.engine import arguments
from omni_notebook.errors import ArgumentError
from omni_notebook.protocol import LoRARequest

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from omni_notebook.engine.remote.line import Answer, Line
    from omni_notebook.engine.remote.servers import Server

T = TypeVar("T")


class RemoteLoRACalls(ABC):
    """Adding, removing, pinning and listing; folders are those of the server's machine."""

    _server: Server
    _line: Line

    @abstractmethod
    async def _run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run on the connection's loop."""

    @abstractmethod
    async def _order(self, what: str, path: str, body: dict[str, Any] | None, method: str = "POST") -> Answer:
        """An order's answer."""

    async def add_lora(
        self, request: LoRARequest, stage_ids: Sequence[int] | int | None = None, timeout: float | None = None
    ) -> bool:
        """Add an adapter; as `AsyncOmni.add_lora`."""

        async def run() -> bool:
            self._server.has("add_lora")
            given: Any = request
            if not isinstance(given, LoRARequest):
                msg = f"add_lora takes a LoRARequest, not {given!r}; nothing changed"
                raise ArgumentError(msg)
            body = {
                "lora_name": request.lora_name,
                "lora_int_id": request.lora_int_id,
                "lora_path": request.lora_path,
                "stage_ids": None if stage_ids is None else arguments.listed("stage_ids", stage_ids),
                "timeout": arguments.check_timeout(timeout),
            }
            return bool((await self._order("addition of an adapter", "/loras", body)).body.get("added"))

        return await self._run(run)

    async def remove_lora(self, lora_int_id: int, timeout: float | None = None) -> bool:
        """Remove an adapter from every stage; as `AsyncOmni.remove_lora`. `timeout` is the server's own."""

        async def run() -> bool:
            self._server.has("remove_lora")
            arguments.check_timeout(timeout)
            path = f"/loras/{_number(lora_int_id)}"
            return bool((await self._order("removal of an adapter", path, None, "DELETE")).body.get("removed"))

        return await self._run(run)

    async def pin_lora(self, lora_int_id: int, timeout: float | None = None) -> bool:
        """Keep an adapter in its slot for good; as `AsyncOmni.pin_lora`. `timeout` is the server's own."""

        async def run() -> bool:
            self._server.has("pin_lora")
            arguments.check_timeout(timeout)
            path = f"/loras/{_number(lora_int_id)}/pin"
            return bool((await self._order("pinning of an adapter", path, None)).body.get("pinned"))

        return await self._run(run)

    async def list_loras(self) -> list[int]:
        """The numbers of all adapters, sorted; works in every state."""

        async def run() -> list[int]:
            self._server.has("list_loras")
            status = await self._server.status(self._line)
            return sorted({lora.lora_int_id for stage in status.stages for lora in stage.loras})

        return await self._run(run)


def _number(lora_int_id: Any) -> int:
    if isinstance(lora_int_id, bool) or not isinstance(lora_int_id, int):
        msg = f"lora_int_id={lora_int_id!r} is not a whole number; nothing changed"
        raise ArgumentError(msg)
    return lora_int_id
