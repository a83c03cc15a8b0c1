"""http or https: which of the two is spoken at an address, found out where nobody answered."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from omni_notebook.engine.remote.address import Address

TRY_S = 2.0
_PORTS = {"http": 80, "https": 443}
_BEGINNING = b"HTTP/"


async def other_scheme(address: Address) -> str | None:
    """The URL with the other scheme, if that is what is spoken there; neither key nor order is sent."""
    url = httpx.URL(address.url)
    port = url.port or _PORTS[url.scheme]
    look = _speaks_tls if url.scheme == "http" else _speaks_plainly
    with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(min(TRY_S, address.short_s)):
            if await look(url.host, port):
                scheme = "https" if url.scheme == "http" else "http"
                return str(url.copy_with(scheme=scheme, port=port))
    return None


async def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # whose it is will be asked when it is used
    _, writer = await asyncio.open_connection(host, port, ssl=context)
    writer.transport.abort()
    return True


async def _speaks_plainly(host: str, port: int) -> bool:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        return await reader.readexactly(len(_BEGINNING)) == _BEGINNING
    finally:
        writer.transport.abort()
