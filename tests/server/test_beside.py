"""A server on a thread beside other code: it ends whole, and what is not its own it leaves alone."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.engine.remote.client import RemoteOmni
from omni_notebook.errors import EngineClosedError
from tests.engine.engine_helpers import collect, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from omni_notebook.server.serving import Server

LONG = {"num_inference_steps": 1000}


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[AsyncOmni]:
    with AsyncOmni("demo", executor="uni") as engine:
        yield engine


def begun(engine: AsyncOmni) -> Server:
    from omni_notebook.server.serving import Server
    from omni_notebook.server.settings import ServerSettings

    server = Server(engine, ServerSettings(port=0))
    server.start()
    return server


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_log_files_of_whoever_serves_go_on(engine: AsyncOmni, tmp_path: Path) -> None:
    handler = logging.FileHandler(tmp_path / "mine.log", mode="w")
    logger = logging.getLogger("mine")
    logger.addHandler(handler)
    try:
        logger.warning("before")
        begun(engine).stop()
        logger.warning("after")
    finally:
        logger.removeHandler(handler)
        handler.close()
    assert (tmp_path / "mine.log").read_text().split() == ["before", "after"]


def test_a_fork_that_lives_on_keeps_neither_the_port_nor_connections_open(engine: AsyncOmni) -> None:
    server = begun(engine)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        fork = os.fork()
        if not fork:
            signal.pause()
            os._exit(0)
        try:
            server.stop()
            assert not listens(server.port)
            while client.recv(4096):  # until it is closed, or the timeout
                pass
        finally:
            os.kill(fork, signal.SIGKILL)
            os.waitpid(fork, 0)


def test_a_stream_that_the_servers_end_cuts_is_told_so_and_nothing_is_logged_as_a_fault(
    engine: AsyncOmni, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("omni_notebook.server.serving.GRACE_S", 1)
    server = begun(engine)

    async def scenario(known: RemoteOmni) -> None:
        asking = asyncio.create_task(collect(known, sampling_params=LONG))
        await until(lambda: engine.status().stages[1].running)
        await asyncio.to_thread(server.stop)
        with pytest.raises(EngineClosedError, match="the server ended before this request had; it was ended too"):
            await asking
        await until(lambda: not engine.status().stages[1].running)

    with RemoteOmni(server.url) as known:
        asyncio.run(scenario(known))
    assert not [record.getMessage() for record in caplog.records if record.exc_info]


def test_an_engine_that_ends_before_its_server_has_begun_is_not_served_at_all(
    engine: AsyncOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ended(_metrics: Any) -> None:
        """As the metrics of an engine that is no more."""

    monkeypatch.setattr("omni_notebook.server.metrics.Metrics.follow", ended)
    names = {thread.name for thread in threading.enumerate()}
    with pytest.raises(EngineClosedError, match=r"ended before the server on .* had begun; nothing listens"):
        begun(engine)
    assert {thread.name for thread in threading.enumerate()} <= names
