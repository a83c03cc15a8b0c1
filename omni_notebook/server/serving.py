"""Listening: on a thread beside a notebook, or for a process's whole life."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
from typing import TYPE_CHECKING

import uvicorn

from omni_notebook.errors import ConfigError, DeadlineError, EngineClosedError
from omni_notebook.server.app import make_app
from omni_notebook.server.connections import watched_protocol

if TYPE_CHECKING:
    from omni_notebook.server.settings import ServerSettings
    from omni_notebook.verbs.engine_api import Engine

STARTING_S = 20.0
GRACE_S = 10
"""Requests in progress are given this long when the server ends."""


class Server:
    """Serves an engine until `stop`, which leaves the engine as it is, or until the engine is shut down.

    Raises:
        ConfigError: the address is taken or not this machine's; nothing listens.
    """

    def __init__(self, engine: Engine, settings: ServerSettings, listening: socket.socket | None = None) -> None:
        self.settings = settings
        self._socket = listen(settings) if listening is None else listening
        self.port: int = self._socket.getsockname()[1]
        self._app = make_app(engine, settings, self._end)
        config = uvicorn.Config(
            self._app,
            http=watched_protocol(settings.patience_s, _room(settings.connections)),
            ws="none",
            log_config=None,  # uvicorn's own would close every log file that this process has open
            log_level="warning",
            access_log=False,
            lifespan="on",
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
            h11_max_incomplete_event_size=64 * 1024,
        )
        self._server = _Uvicorn(config)
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{_spelled(self.settings.host)}:{self.port}"

    @property
    def running(self) -> bool:
        """Whether it answers."""
        return self._thread is not None and self._thread.is_alive() and not self._server.should_exit

    def start(self) -> None:
        """Serve on a thread of its own; returns once it answers.

        Raises:
            EngineClosedError: the engine ended meanwhile; nothing listens.
            DeadlineError: it did not begin in time; nothing listens.
        """
        self._thread = threading.Thread(target=self._alone, name="omni-server", daemon=True)
        self._thread.start()
        waiting = threading.Event()
        for _ in range(int(STARTING_S / 0.01)):
            if self._server.started or not self._thread.is_alive():
                break
            waiting.wait(0.01)
        if self._server.should_exit or not self._thread.is_alive():
            self.stop()
            msg = f"the engine ended before the server on {self.url} had begun; nothing listens"
            raise EngineClosedError(msg)
        if not self._server.started:
            self.stop()
            msg = f"the server on {self.url} did not begin within {STARTING_S:g} s; nothing listens"
            raise DeadlineError(msg)

    def _alone(self) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._server.serve([self._socket]))
        finally:
            _silence(self._socket)

    def stop(self) -> None:
        """Take no more requests, let those in progress end for `GRACE_S`, return when nothing listens."""
        self._end()
        if self._thread is not None:
            self._thread.join(GRACE_S + 5)
        _silence(self._socket)

    def _end(self) -> None:
        self._server.should_exit = True
        self._app.state.listeners.end()
        self._app.state.audits.end()


class _Uvicorn(uvicorn.Server):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen no more, and end what is in progress."""
        for one in sockets or ():
            _silence(one, close=False)  # uvicorn takes its readers away first
        await super().shutdown(sockets)


def _silence(listening: socket.socket, *, close: bool = True) -> None:
    """Nobody is answered here any more, nor by a fork of this process, which has the socket too."""
    with contextlib.suppress(OSError):  # closed
        listening.shutdown(socket.SHUT_RDWR)
    if close:
        listening.close()


def _room(wanted: int) -> int:
    """Connections, at most half of the files that this process may open: its ranks' are files too."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if files == resource.RLIM_INFINITY else min(wanted, files // 2)


def listen(settings: ServerSettings) -> socket.socket:
    """A socket at the server's address, from which nobody is answered yet.

    Raises:
        ConfigError: the address is taken or not this machine's.
    """
    try:
        infos = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = infos[0]
        with contextlib.ExitStack() as undo:
            listening = undo.enter_context(socket.socket(family, kind, protocol))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen()  # a bound port alone may be bound again; whoever connects by now waits
            undo.pop_all()
    except OSError as error:
        where = f"{_spelled(settings.host)}:{settings.port}"
        msg = f"can not listen on {where}: {error.strerror}; choose another --port or --host"
        raise ConfigError(msg) from error
    return listening


def _spelled(host: str) -> str:
    """A host as it stands before a port."""
    return f"[{host}]" if ":" in host else host
