"""Servers for tests, and a client that also shows the engine behind its server, to make that one fail."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from omni_notebook.engine.remote.client import RemoteOmni
from omni_notebook.protocol import EngineStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

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


class Rude(ThreadingHTTPServer):
    """A server that tells that it is one of ours, counts orders, and does with each what a test wants.

    Attributes:
        orders: paths of the POSTs that came.
        on_order: called with the handler of each; it may answer, wait, or close the connection.
        on_status: the same for each status that is asked for; at first it answers.
        host: what it says that its machine is called.
        told: what it tells of itself; None: it has no such path.
        name: of the engine that it serves, if it tells one.
        silent: while it is set, nothing is answered to a GET.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _RudeHandler)
        self.orders: list[str] = []
        self.on_order: Callable[[BaseHTTPRequestHandler], None] = lambda _handler: None
        self.on_status: Callable[[BaseHTTPRequestHandler], None] = _tell_status
        self.host: str | None = socket.gethostname()
        self.name: str | None = None
        self.told: dict[str, Any] | None = {"name": "omni-notebook", "version": "0", "pid": 1}
        self.silent, self.freed = threading.Event(), threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_about: Any) -> None:
        """Clients that leave are what these tests are about."""


class _RudeHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Rude

    def end_headers(self) -> None:
        if self.server.name is not None:
            self.send_header("X-Omni-Engine", self.server.name)
        super().end_headers()

    def do_GET(self) -> None:
        if self.server.silent.is_set():
            self.server.freed.wait(30)
            return
        if self.path == "/v1/omni/version" and self.server.told is not None:
            tell(self, {**self.server.told, "host": self.server.host})
        elif self.path == "/v1/omni/status":
            self.server.on_status(self)
        else:
            tell(self, {}, 404)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.server.orders.append(self.path)
        self.server.on_order(self)

    def log_message(self, *_about: Any) -> None:
        """Nothing."""


def _tell_status(handler: BaseHTTPRequestHandler) -> None:
    status = EngineStatus(model="rude", closed=False, paused=False, uptime_s=0.0, stages=())
    tell(handler, msgspec.to_builtins(status))


def tell(handler: BaseHTTPRequestHandler, body: Any, status: int = 200) -> None:
    """Answer with JSON."""
    content = msgspec.json.encode(body)
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


@contextlib.contextmanager
def rude() -> Iterator[Rude]:
    """One on a port of its own."""
    server = Rude()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.freed.set()
        server.shutdown()
        server.server_close()
        thread.join()


def certificate(folder: Path) -> Path:
    """A file with a key and a certificate that nobody vouches for."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=here"]
    command = ["openssl", *words, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, capture_output=True, timeout=30, check=True)
    both = folder / "both.pem"
    both.write_text(key.read_text() + certificate.read_text())
    return both
