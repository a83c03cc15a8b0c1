"""`omni.serve`: the notebook's own engine over HTTP, from a thread beside it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from omni_notebook.errors import ArgumentError, EngineClosedError, UnsupportedError
from omni_notebook.server.settings import ServerSettings
from omni_notebook.verbs import serving
from omni_notebook.verbs.session import current

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.server.serving import Server

_one_at_a_time = threading.Lock()


def serve(
    engine: Any = None,
    port: int = serving.PORT,
    host: str = "127.0.0.1",
    *,
    api_key: str | None = None,
    served_model_names: Sequence[str] = (),
    allowed_hosts: Sequence[str] = (),
) -> Server:
    """Serve an engine over HTTP, on a thread of its own, until `stop()` or the engine's end; returns once it answers.

    Args:
        engine: None = the one that `%omni start` started.
        port: 0 takes a free one; `.url` says which.
        host: an address of this machine; anything but the loopback needs `api_key`.
        api_key: what clients send as `Authorization: Bearer …`.
        served_model_names: what requests may call the model; none = the name that it was started with.
        allowed_hosts: further names by which clients may call this server.

    Raises:
        EngineClosedError: there is no engine.
        ArgumentError: it is served already; names the address.
        ConfigError: the address is taken, not this machine's, or needs a key; nothing listens.
        UnsupportedError: the server's libraries are not installed.
    """
    settings = ServerSettings(
        host=host,
        port=port,
        api_key=api_key,
        served_model_names=tuple(served_model_names),
        allowed_hosts=tuple(allowed_hosts),
    )
    with _one_at_a_time:
        return _begun(current() if engine is None else engine, settings)


def _begun(served: Any, settings: ServerSettings) -> Server:
    if served.status().closed:
        msg = "the engine was shut down; start a new one. Nothing listens"
        raise EngineClosedError(msg)
    running = serving.server_of(served)
    if running is not None:
        msg = f"the engine is served already, on {running.url}; %omni serve --stop ends that. Nothing was changed"
        raise ArgumentError(msg)
    try:
        from omni_notebook.server.serving import Server  # noqa: PLC0415  (an extra)
    except ImportError as error:
        msg = f"the server needs {error.name}: pip install 'omni-notebook[server]'. Nothing listens"
        raise UnsupportedError(msg) from error
    server = Server(served, settings)
    server.start()
    serving.note(served, server)
    return server
