"""`serve`: the notebook's own engine over HTTP. The server's layer is above this one and is loaded when it is used."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any, Protocol

from omni_notebook.errors import UnsupportedError
from omni_notebook.verbs.interrupts import InterruptedVerb, interrupts_held
from omni_notebook.verbs.registry import verb
from omni_notebook.verbs.waits import in_thread

if TYPE_CHECKING:
    import argparse
    from concurrent.futures import Future

    from omni_notebook.verbs.engine_api import Engine
    from omni_notebook.verbs.parsing import VerbParser
    from omni_notebook.verbs.session import Session

PORT = 8000
KEY_VARIABLE = "OMNI_NOTEBOOK_API_KEY"
_SERVER = "omni_notebook.server.beside"


def add_address(parser: argparse.ArgumentParser) -> None:
    """Where a server listens, for whom, and by which names."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", metavar="HOST", help="address to listen on (127.0.0.1)")
    add("--port", type=int, default=PORT, metavar="N", help=f"port to listen on ({PORT}); 0 takes a free one")
    add("--api-key", default=os.environ.get(KEY_VARIABLE), metavar="KEY", help="what clients must send")
    add(
        "--served-model-name",
        dest="served_model_names",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="what requests call the model, one name or several",
    )
    add(
        "--allowed-host",
        dest="allowed_hosts",
        action="append",
        default=[],
        metavar="NAME",
        help="one more Host header to answer; may be repeated",
    )


class Listener(Protocol):
    """A server that serves an engine."""

    @property
    def url(self) -> str:
        """Where it listens."""

    @property
    def running(self) -> bool:
        """Whether it answers."""

    def stop(self) -> None:
        """End it; returns when nothing listens."""


_servers: list[tuple[Engine, Listener]] = []
"""Who is served where; those that have ended go at the next look."""


def server_of(engine: Engine) -> Listener | None:
    """The server of an engine, if one runs."""
    _servers[:] = [one for one in _servers if one[1].running]
    return next((server for served, server in _servers if served is engine), None)


def note(engine: Engine, server: Listener) -> None:
    """Remember that `server` serves `engine`."""
    _servers.append((engine, server))


def end_server(engine: Engine) -> None:
    """Return when nothing serves `engine` any more, which may have ended itself."""
    for served, server in tuple(_servers):
        if served is engine:
            server.stop()
    server_of(engine)


@verb
class Serve:
    """Serve the engine over HTTP while the notebook goes on; --stop ends it, as the engine's end does.

    What is put to sleep here can be woken over HTTP, and the other way round. Listens on this machine's loopback; any
    other --host needs a key, which OMNI_NOTEBOOK_API_KEY may hold so that no notebook keeps it. It needs the extra
    [server].
    Example: %omni serve --port 8000
    """

    name = "serve"
    python = "omni.serve(port=8000)"

    def prepare_parser(self, parser: VerbParser) -> None:
        """Where, for whom, under which names."""
        add = parser.add_argument
        add("--stop", action="store_true", help="end it: requests in progress may finish, the engine stays as it is")
        add_address(parser)

    def run(self, session: Session, args: argparse.Namespace) -> None:
        """Begin or end, and say in one line what is true now."""
        engine = session.engine
        if args.stop:
            session.frontend.write(_stopped(session, engine))
            return
        if engine.url is not None:
            msg = f"the engine is served at {engine.url} already, by its own server; nothing was changed"
            raise UnsupportedError(msg)
        wishes = {key: value for key, value in vars(args).items() if key not in {"stop", "cell", "words"}}
        server = _begun(session, engine, wishes)
        here = "to this machine only, another --host needs --api-key"
        whom = here if args.api_key is None else "to whoever sends 'Authorization: Bearer KEY'"
        session.frontend.write(f"{server.url} serves {engine.status().model} {whom}; %omni serve --stop ends it\n")


def _begun(session: Session, engine: Engine, wishes: dict[str, Any]) -> Listener:
    serve = importlib.import_module(_SERVER).serve
    future: Future[Listener] | None = None
    try:
        with interrupts_held():
            future = in_thread(lambda: serve(engine, **wishes), "omni-serve")
        return session.frontend.wait(future, None, None)
    except KeyboardInterrupt:
        if future is not None:
            future.add_done_callback(_end)
        msg = "interrupted: the engine is not served; %omni serve serves it"
        raise InterruptedVerb(msg) from None


def _end(future: Future[Listener]) -> None:
    if future.exception() is None:
        future.result().stop()


def _stopped(session: Session, engine: Engine) -> str:
    server = server_of(engine)
    if server is None:
        return "the engine is not served; %omni serve serves it\n"
    try:
        with interrupts_held():
            future = in_thread(server.stop, "omni-serve-stop")
        session.frontend.wait(future, None, None)
    except KeyboardInterrupt:
        msg = f"interrupted too late: {server.url} takes no more requests, and ends those in progress"
        raise InterruptedVerb(msg) from None
    return f"nothing listens on {server.url} any more; the engine goes on\n"
