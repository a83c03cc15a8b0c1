"""`connect`: an engine that a server runs."""

from __future__ import annotations

import concurrent.futures
import os
from typing import TYPE_CHECKING

from omni_notebook.errors import ArgumentError
from omni_notebook.verbs.interrupts import InterruptedVerb, interrupts_held
from omni_notebook.verbs.lifecycle import make_room
from omni_notebook.verbs.registry import verb
from omni_notebook.verbs.serving import KEY_VARIABLE, server_of
from omni_notebook.verbs.session import CANCEL_GRACE_S, Session
from omni_notebook.verbs.waits import in_thread

if TYPE_CHECKING:
    import argparse
    from concurrent.futures import Future

    from omni_notebook.verbs.engine_api import Engine, ServedEngine
    from omni_notebook.verbs.parsing import VerbParser


@verb
class Connect:
    """Connect to an engine that a server runs, and return it: every verb then works on that one.

    The server is omni-notebook serve, %omni serve of another notebook, or vLLM-Omni's own, which can less. A key that
    stands in a cell is saved with the notebook: OMNI_NOTEBOOK_API_KEY keeps it out. Folders that a verb names are those
    of the server's machine. %omni stop disconnects; the engine runs on.
    Example: engine = %omni connect http://gpu-7:8000
    """

    name = "connect"
    python = "engine = RemoteOmni('http://host:8000')"

    def prepare_parser(self, parser: VerbParser) -> None:
        """Where, with which key, and whether instead of what is there."""
        parser.add_argument("url", metavar="URL", help="of the server, such as http://host:8000")
        parser.add_argument("--api-key", metavar="KEY", help=f"what the server asks for ({KEY_VARIABLE})")
        replace = "stop the engine that is running, or disconnect, once this one answers"
        parser.add_argument("--replace", action="store_true", help=replace)

    def run(self, session: Session, args: argparse.Namespace) -> Engine:
        """The engine there; what was there before is left alone until it answers."""
        if not args.replace:
            make_room(session, self.name, replace=False)
        key = args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE)
        future = None
        try:
            with interrupts_held():
                future = in_thread(lambda: _connect(args.url, key), "omni-connect")
            engine = session.frontend.wait(future, None, None)
        except KeyboardInterrupt:
            raise InterruptedVerb(_undo(future, session)) from None
        try:
            _check_elsewhere(session, engine)
            make_room(session, self.name, replace=True)
        except BaseException:
            engine.shutdown()
            raise
        session.use(engine)
        where = f" on {engine.host}" if engine.host is not None and engine.host != engine.url else ""
        session.frontend.write(f"connected to {engine.url}: {engine.status().model}{where}; %omni stop disconnects\n")
        session.tell_notes()
        return session.engine


def _check_elsewhere(session: Session, found: ServedEngine) -> None:
    """Return if making room for this engine does not end it.

    Raises:
        ArgumentError: it is the session's own; nothing was changed.
    """
    server = None if session.attached is None else server_of(session.attached)
    if server is not None and found.in_this_process and _port(server.url) == _port(found.url):
        msg = (
            f"{found.url} is this session's own engine, which %omni serve serves: every verb works on it as it is; "
            "nothing was changed"
        )
        raise ArgumentError(msg)


def _port(url: str | None) -> str:
    return (url or "").rpartition(":")[2]


def _connect(url: str, key: str | None) -> ServedEngine:
    from omni_notebook.engine.remote.client import RemoteOmni  # noqa: PLC0415  (loaded when used)

    engine: ServedEngine = RemoteOmni(url, key)
    return engine


def _undo(future: Future[ServedEngine] | None, session: Session) -> str:
    """Have a connection that nobody waits for closed; what to tell."""
    if future is not None:
        future.add_done_callback(_leave)
        concurrent.futures.wait([future], timeout=CANCEL_GRACE_S)
    return f"interrupted: not connected; {session.state_now()}"


def _leave(future: Future[ServedEngine]) -> None:
    if future.exception() is None:
        future.result().shutdown()
