"""The calls of `RemoteOmni` that concern LoRA adapters."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeVar

from omni_notebook.engine import arguments
from omni_notebook.engine.loras import check_lora_id, lora_request_from
from omni_notebook.engine.remote.bounds import bound
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
    host: str | None

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
            given = self._request(request)
            body = {
                "lora_name": given.lora_name,
                "lora_int_id": given.lora_int_id,
                "lora_path": given.lora_path,
                "stage_ids": None if stage_ids is None else arguments.listed("stage_ids", stage_ids),
                "timeout": bound(timeout),
            }
            return bool((await self._order("addition of an adapter", "/loras", body)).body.get("added"))

        return await self._run(run)

    async def remove_lora(self, lora_int_id: int, timeout: float | None = None) -> bool:
        """Remove an adapter from every stage; as `AsyncOmni.remove_lora`. `timeout` is the server's own."""

        async def run() -> bool:
            self._server.has("remove_lora")
            bound(timeout)
            path = f"/loras/{check_lora_id(lora_int_id)}"
            return bool((await self._order("removal of an adapter", path, None, "DELETE")).body.get("removed"))

        return await self._run(run)

    async def pin_lora(self, lora_int_id: int, timeout: float | None = None) -> bool:
        """Keep an adapter in its slot for good; as `AsyncOmni.pin_lora`. `timeout` is the server's own."""

        async def run() -> bool:
            self._server.has("pin_lora")
            bound(timeout)
            path = f"/loras/{check_lora_id(lora_int_id)}/pin"
            return bool((await self._order("pinning of an adapter", path, None)).body.get("pinned"))

        return await self._run(run)

    async def list_loras(self) -> list[int]:
        """The numbers of all adapters, sorted; works in every state."""

        async def run() -> list[int]:
            self._server.has("list_loras")
            status = await self._server.status(self._line)
            return sorted({lora.lora_int_id for stage in status.stages for lora in stage.loras})

        return await self._run(run)

    async def _named(self, asked: Any) -> int | str | None:
        """The adapter that a request names, as it goes over the wire.

        Raises:
            ArgumentError: it is none, or the one with this number there is another; nothing was started.
        """
        if asked is None or isinstance(asked, str):
            return asked
        if hasattr(asked, "__index__") and not isinstance(asked, bool):
            return operator.index(asked)
        given = self._request(asked)
        status = await self._server.status(self._line)
        known = {lora.lora_int_id: lora for stage in status.stages for lora in stage.loras}
        found = known.get(given.lora_int_id)
        alike = found is not None and found.lora_name == given.lora_name
        if found is None or not alike or (self.host is None and found.lora_path != given.lora_path):
            titles = (f"{lora.lora_name!r} (id {lora.lora_int_id})" for lora in known.values())
            have = ", ".join(titles) or "none; call add_lora(request)"
            msg = f"there is no adapter {asked!r}; adapters are: {have}. Nothing was started"
            raise ArgumentError(msg)
        return given.lora_int_id

    def _request(self, value: Any) -> LoRARequest:
        """An adapter with its folder as the server must name it; vLLM's class will do."""
        given = lora_request_from(value)
        return given if self.host is None else LoRARequest(given.lora_name, given.lora_int_id, str(value.lora_path))
