"""Servers for tests, and a client that also shows the engine behind its server, to make that one fail."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from omni_notebook.engine.remote.client import RemoteOmni

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_notebook.engine.async_omni import AsyncOmni
    from omni_notebook.server.serving import Server


@contextlib.contextmanager
def serving(engine: Any, **settings: Any) -> Iterator[Server]:
    """A server of an engine, on a port of its own."""
    from omni_notebook.server.serving import Server
    from omni_notebook.server.settings import ServerSettings

    server = Server(engine, ServerSettings(**{"port": 0, **settings}))
    server.start()
    try:
        yield server
    finally:
        server.stop()


class Contract(RemoteOmni):
    """The engine's own tests run with it; what they do to ranks and look up inside goes to `embedded`."""

    def __init__(self, url: str, embedded: AsyncOmni) -> None:
        super().__init__(url)
        self.embedded = embedded

    @property
    def _core(self) -> Any:
        return self.embedded._core
