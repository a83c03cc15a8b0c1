"""Clients that are slow, stop half-way or never begin: they hold nothing for ever and start nothing by halves."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from omni_notebook.server.guards import BodyGuard
from tests.engine.engine_helpers import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import Message, Receive, Scope, Send

    from omni_notebook.engine.async_omni import AsyncOmni
    from omni_notebook.server.serving import Server

PATIENCE_S = 1.0
HEAD = b"POST /v1/omni/sleep HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture
def strict(engine: AsyncOmni) -> Iterator[Server]:
    """A server that waits a second for its clients."""
    from omni_notebook.server.serving import Server
    from omni_notebook.server.settings import ServerSettings

    server = Server(engine, ServerSettings(port=0, patience_s=PATIENCE_S))
    server.start()
    yield server
    server.stop()


def answer_of(server: Server, sent: bytes, dripped: bytes = b"") -> bytes:
    """What comes until the server closes; `dripped` goes out byte after byte meanwhile."""
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(sent)
        client.settimeout(0.2)
        said, began_s, left = b"", time.monotonic(), list(dripped)
        while time.monotonic() - began_s < 10 * PATIENCE_S:
            try:
                if left:
                    client.sendall(bytes([left.pop(0)]))
                part = client.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                return said
            if not part:
                return said
            said += part
    msg = "the connection is open still"
    raise AssertionError(msg)


@pytest.mark.parametrize(
    "sent",
    [HEAD + b"Content-Length: 20\r\n\r\n{}", HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"],
    ids=["length", "chunked"],
)
def test_a_body_that_does_not_end_is_408_and_nothing_began(strict: Server, engine: AsyncOmni, sent: bytes) -> None:
    said = answer_of(strict, sent)
    assert said.startswith(b"HTTP/1.1 408")
    assert b"nothing was begun" in said
    assert engine.status().stages[0].state == "AWAKE"


def test_connections_have_a_bound_and_those_above_are_told(engine: AsyncOmni) -> None:
    import httpx

    from omni_notebook.server.connections import REFUSED_AT_ONCE
    from omni_notebook.server.serving import Server
    from omni_notebook.server.settings import ServerSettings

    most = 4
    server = Server(engine, ServerSettings(port=0, connections=most))
    server.start()
    opened: list[socket.socket] = []

    def settled(number: int) -> bool:
        return len(server._server.server_state.connections) == number

    def fill(number: int) -> None:
        opened.extend(socket.create_connection(("127.0.0.1", server.port)) for _ in range(number - len(opened)))
        asyncio.run(until(lambda: settled(number)))

    try:
        fill(most)
        answer = httpx.post(f"{server.url}/v1/omni/sleep", json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "BUSY")
        assert "4 connections are open, the most that this server holds" in answer.json()["error"]["message"]
        assert (answer.headers["connection"], int(answer.headers["retry-after"]) > 0) == ("close", True)
        assert engine.status().stages[0].state == "AWAKE"
        fill(most + REFUSED_AT_ONCE)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/health")
        while len(opened) >= most:
            opened.pop().close()
        asyncio.run(until(lambda: settled(most - 1)))
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    finally:
        for one in opened:
            one.close()
        server.stop()


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /he"])
def test_a_head_that_does_not_end_is_closed_even_if_it_drips(strict: Server, sent: bytes) -> None:
    answer_of(strict, sent, dripped=b"x" * 200)


@pytest.mark.parametrize(
    "sent",
    [HEAD + b"Content-Length: 20\r\n\r\n{}", HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"],
    ids=["length", "chunked"],
)
def test_a_client_that_leaves_within_its_body_has_ordered_nothing(
    server: Server, engine: AsyncOmni, sent: bytes
) -> None:
    import httpx

    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(sent)
        httpx.get(f"{server.url}/health")  # by then the half has been read
    for _ in range(20):
        httpx.get(f"{server.url}/health")
    assert [stage.state for stage in engine.status().stages] == ["AWAKE", "AWAKE"]


def test_bodies_on_their_way_hold_no_more_than_sixteen_of_the_longest() -> None:
    begun: list[Scope] = []
    answers: list[int] = []

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        begun.append(scope)

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answers.append(message["status"])

    async def scenario() -> None:
        guard, never = BodyGuard(app, most=100, patience_s=20), asyncio.Event()

        async def half() -> None:
            parts = iter([{"type": "http.request", "body": b"x" * 90, "more_body": True}])

            async def receive() -> Message:
                part = next(parts, None)
                if part is None:
                    await never.wait()
                return part or {"type": "http.disconnect"}

            await guard({"type": "http", "headers": []}, receive, send)

        halves = [asyncio.create_task(half()) for _ in range(30)]
        await asyncio.wait(halves, timeout=0.2)
        assert answers == [503] * 13
        never.set()
        await asyncio.gather(*halves)
        assert guard._held == 0

    asyncio.run(scenario())
    assert begun == []


def test_whoever_stops_reading_the_events_is_cut_off(strict: Server, engine: AsyncOmni) -> None:
    hub = engine._core.hub
    before = set(hub._everyone())
    with socket.create_connection(("127.0.0.1", strict.port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(b"GET /v1/omni/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        asyncio.run(until(lambda: set(hub._everyone()) - before))
        (listening,) = map(id, set(hub._everyone()) - before)
        stop = threading.Event()

        def talk() -> None:
            from omni_notebook.protocol import RequestEvent, RequestState

            while not stop.wait(0.002):
                hub.push(RequestEvent(0.0, "x" * 20000, 0, RequestState.RUNNING, None))

        talking = threading.Thread(target=talk)
        talking.start()
        try:
            asyncio.run(until(lambda: listening not in map(id, hub._everyone())))
        finally:
            stop.set()
            talking.join()


LENGTH = 6 * 1024 * 1024
PART = 64 * 1024
KEPT, CLOSED = b"", b"Connection: close\r\n"


def asking_for_much(server: Server, more: bytes) -> socket.socket:
    """A connection on which megabytes are on their way, written by the server at once."""
    from starlette.responses import Response

    server._app.add_route("/much", lambda _request: Response(b"x" * LENGTH))
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PART)
    client.settimeout(10 * PATIENCE_S)
    client.connect(("127.0.0.1", server.port))
    client.sendall(b"GET /much HTTP/1.1\r\nHost: localhost\r\n" + more + b"\r\n")
    return client


def taken(client: socket.socket, most: int) -> int:
    """How many bytes came, at most so many, and those slowly."""
    came = 0
    while came < most:
        due = min(came + PART, most)
        while came < due:
            part = client.recv(due - came)
            if not part:
                return came
            came += len(part)
        time.sleep(0.08)
    return came


def test_slow_clients_that_go_on_taking_get_all_of_it(strict: Server) -> None:
    def ask(more: bytes) -> int:
        with asking_for_much(strict, more) as client:
            head = b""
            while b"\r\n\r\n" not in head:
                head += client.recv(1)
            return taken(client, LENGTH)

    began_s = time.monotonic()
    with ThreadPoolExecutor() as clients:
        assert list(clients.map(ask, [KEPT, CLOSED])) == [LENGTH, LENGTH]
    assert time.monotonic() - began_s > 5 * PATIENCE_S


@pytest.mark.parametrize("more", [KEPT, CLOSED], ids=["kept", "closed"])
@pytest.mark.parametrize("first", [0, 8 * PART])
def test_a_client_that_takes_no_more_of_an_answer_is_cut_off(strict: Server, first: int, more: bytes) -> None:
    connections = strict._server.server_state.connections
    with asking_for_much(strict, more) as client:
        assert taken(client, first) == first
        asyncio.run(until(lambda: len(connections) == 1))
        asyncio.run(until(lambda: not connections, 5 * PATIENCE_S))


def test_the_end_lets_go_of_who_listens_at_once(engine: AsyncOmni) -> None:
    import httpx

    from omni_notebook.server.serving import Server
    from omni_notebook.server.settings import ServerSettings

    server = Server(engine, ServerSettings(port=0))
    server.start()
    with httpx.Client(base_url=server.url, timeout=20) as client, client.stream("GET", "/v1/omni/events") as stream:
        lines = stream.iter_lines()
        next(lines)
        stopping = threading.Thread(target=server.stop)
        began_s = time.monotonic()
        stopping.start()
        list(lines)  # ends in order: a cut stream raises
        stopping.join()
    assert time.monotonic() - began_s < 4


def test_what_the_end_cancels_is_503_in_our_form(
    engine: AsyncOmni, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import httpx

    from omni_notebook.server import serving
    from omni_notebook.server.settings import ServerSettings

    monkeypatch.setattr(serving, "GRACE_S", 1)
    server = serving.Server(engine, ServerSettings(port=0))
    server.start()
    found: list[httpx.Response] = []

    def ask() -> None:
        body = {"prompt": "a star", "num_inference_steps": 1000, "n": 16}
        found.append(httpx.post(f"{server.url}/v1/images/generations", json=body, timeout=30))

    asking = threading.Thread(target=ask)
    asking.start()
    asyncio.run(until(lambda: engine.status().stages[1].running))
    server.stop()
    asking.join()
    assert found[0].status_code == 503
    assert json.loads(found[0].content)["error"]["code"] == "ENDED"
    assert "Traceback" not in caplog.text
