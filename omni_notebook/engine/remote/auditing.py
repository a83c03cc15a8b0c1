"""An audit on a server, which tells how far it is while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from httpx_sse import EventSource, SSEError

from omni_notebook.engine.remote.decoding import error_of, object_of
from omni_notebook.engine.remote.line import Waiting
from omni_notebook.errors import ServerLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_notebook.engine.remote.line import Line

_OK = 200
_WHAT = "audit"


async def audited(
    line: Line, path: str, body: dict[str, Any], told: Callable[[str, float | None], None]
) -> dict[str, Any]:
    """What the server answers in the end; one that tells no progress answers as well.

    Raises:
        ServerLostError: the server went away; the audit ends there with its client.
        OmniError: it was refused, or failed.
    """
    where = f"POST {line.address.url}{path}"
    async with line.stream(_WHAT, path, body) as response:
        if response.status_code != _OK or "event-stream" not in response.headers.get("content-type", ""):
            content = await response.aread()
            if response.status_code != _OK:
                raise error_of(response.status_code, content, where)
            return object_of(content)
        try:
            async for event in EventSource(response).aiter_sse():
                if event.event == "error":
                    raise error_of(0, event.data.encode(), where)
                found = object_of(event.data.encode())
                if event.event == "result":
                    return found
                if event.event == "progress":
                    told(*_progress(found))
        except SSEError as error:
            raise ServerLostError(str(error)) from None
    raise line.lost(Waiting(_WHAT, streamed=True), EOFError("the stream ended before the audit had"))


def _progress(found: dict[str, Any]) -> tuple[str, float | None]:
    label, share = found.get("label"), found.get("fraction")
    known = float(share) if isinstance(share, int | float) and 0 <= share <= 1 else None
    return (label if isinstance(label, str) else _WHAT), known
