"""A way to a server that is slow, breaks, or goes silent: a TCP proxy that a test turns these on in."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_REQUEST = re.compile(rb"^(GET|POST|DELETE) (\S+) HTTP/1", re.MULTILINE)
_PUMP = "pump"


class Proxy:
    """Passes connections on, from a loop and a thread of its own.

    Attributes:
        delay_s: so long each piece of either direction is held.
        deaf: while it is set nothing passes, and nothing is closed; a path in `deaf_to` is deaf to that alone.
        mute_to: answers to this path do not come; requests for it arrive.
        cut: `(path, n)`: the answer to this path is cut, both ways, after n bytes; once.
        swallow: a request for this path does not reach the server, its connection is cut; once.
        asked: requests that clients began, as `POST /path`.
    """

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self.delay_s = 0.0
        self.deaf = False
        self.deaf_to: str | None = None
        self.mute_to: str | None = None
        self.cut: tuple[str, int] | None = None
        self.swallow: str | None = None
        self.asked: list[str] = []
        self.loop = asyncio.new_event_loop()
        self.url = ""

    async def begin(self) -> asyncio.Server:
        """Listen."""
        server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward, upward = await asyncio.open_connection("127.0.0.1", self._to_port)
        way = _Way(self)
        pumps = {asyncio.create_task(one, name=_PUMP) for one in (way.forth(reader, upward), way.back(onward, writer))}
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for one in (writer, upward):
                one.transport.abort()


class _Way:
    """One connection; it knows which request it carries."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._path = ""
        self._passed = 0

    async def forth(self, client: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        while piece := await client.read(65536):
            for method, path in _REQUEST.findall(piece):
                self._path, self._passed = path.decode(), 0
                self._proxy.asked.append(f"{method.decode()} {self._path}")
            await self._hold()
            if self._proxy.swallow == self._path:
                self._proxy.swallow = None
                return
            server.write(piece)

    async def back(self, server: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        while piece := await server.read(65536):
            await self._hold()
            while self._proxy.mute_to == self._path:  # noqa: ASYNC110  (other threads set it)
                await asyncio.sleep(0.01)
            path, most = self._proxy.cut or ("", 0)
            if path == self._path and self._passed + len(piece) > most:
                client.write(piece[: most - self._passed])
                self._proxy.cut = None
                await asyncio.sleep(0.05)  # what was written gets through
                return
            self._passed += len(piece)
            client.write(piece)

    async def _hold(self) -> None:
        if self._proxy.delay_s:
            await asyncio.sleep(self._proxy.delay_s)
        while self._proxy.deaf or self._proxy.deaf_to == self._path:  # noqa: ASYNC110  (other threads set it)
            await asyncio.sleep(0.01)


@contextlib.contextmanager
def proxied(to_port: int) -> Iterator[Proxy]:
    """A proxy to a port of this machine."""
    proxy = Proxy(to_port)
    loop = proxy.loop
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(proxy.begin(), loop).result(10)
    try:
        yield proxy
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end(server: asyncio.Server) -> None:
    server.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        if task.get_name() == _PUMP:  # the rest ends by itself then
            task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.sleep(0.01)  # sockets are closed by callbacks
