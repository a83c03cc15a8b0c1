"""What no server of this version does, and what happens around a connection: each is told, nothing is lost by it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import signal
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from PIL import Image

from omni_notebook.config import DEMO_FOLDER, PipelineConfig, StageConfig
from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.engine.remote.client import RemoteOmni
from omni_notebook.errors import ArgumentError, OmniError, ServerLostError, SleepError, WakeError
from omni_notebook.notebook.dashboard.widget import Dashboard
from omni_notebook.verbs import serving as served
from omni_notebook.verbs.borrowing.lease import borrowed
from omni_notebook.verbs.interrupts import InterruptedVerb
from omni_notebook.verbs.registry import execute
from omni_notebook.verbs.session import Session
from tests.engine.engine_helpers import collect, until
from tests.remote.screen import Screen
from tests.remote.served import rude, serving, tell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from http.server import BaseHTTPRequestHandler

    from omni_notebook.protocol import OmniACK
    from tests.remote.served import Rude

THINKER = PipelineConfig(stages=(StageConfig(kind="ar", name="thinker", model=str(DEMO_FOLDER / "thinker")),))
LONG = {"num_inference_steps": 1000}


@pytest.fixture
def odd() -> Iterator[Rude]:
    with rude() as server:
        yield server


@pytest.fixture(scope="module")
def demo() -> Iterator[AsyncOmni]:
    with AsyncOmni("demo", executor="uni") as engine:
        yield engine


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    return file.getvalue()


WHOLE = {"request_id": "x", "stage_id": 1, "finished": True, "final_output_type": "image"}
HALVES = [{"png": [base64.b64encode(png()[:length]).decode()]} for length in range(0, len(png()) - 20, 5)]
ODD_OUTPUTS = [{"png": None}, {"png": 5}, {"png": [5]}, {"outputs": None}, {"outputs": [7]}, *HALVES]


def test_an_output_that_can_not_be_read_is_never_an_error_of_pythons_own(odd: Rude) -> None:
    told = [json.dumps({**WHOLE, **one}) for one in ODD_OUTPUTS] + ["[]", "null", '{"a":']

    def answer(handler: BaseHTTPRequestHandler) -> None:
        body = f"event: output\ndata: {told[len(odd.orders) - 1]}\n\n".encode()
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    odd.on_order = answer
    with RemoteOmni(odd.url) as engine:
        for _ in told:
            with pytest.raises(ServerLostError, match="with something else than expected"):
                asyncio.run(collect(engine))
    assert len(odd.orders) == len(told)


@pytest.mark.parametrize(
    "error",
    [
        {"code": "X", "details": {"type_name": "StopIteration"}},
        {"code": "X", "details": {"type_name": "StopAsyncIteration"}},
        {"code": "SLEEP_FAILED"},
    ],
)
def test_a_refusal_is_told_whatever_stands_around_its_message(odd: Rude, error: dict[str, Any]) -> None:
    odd.on_order = lambda handler: tell(handler, {"error": {"message": "no room", **error}, "acks": [5]}, 500)
    with RemoteOmni(odd.url) as engine:
        for order in (engine.restart(0), collect(engine)):
            with pytest.raises(OmniError, match="no room"):
                asyncio.run(order)


def test_a_request_whose_client_leaves_ends_there_though_a_fork_of_the_client_lives_on(demo: AsyncOmni) -> None:
    async def scenario(known: RemoteOmni) -> None:
        asking = asyncio.create_task(collect(known, sampling_params=LONG))
        await until(lambda: demo.status().stages[1].running)
        fork = os.fork()
        if not fork:
            signal.pause()
            os._exit(0)
        try:
            asking.cancel()
            await until(lambda: not demo.status().stages[1].running, 2.0)
        finally:
            os.kill(fork, signal.SIGKILL)
            os.waitpid(fork, 0)  # noqa: ASYNC222  (it was killed)
        assert (await collect(known))[-1].finished

    with serving(demo) as server, RemoteOmni(server.url) as known:
        asyncio.run(scenario(known))


def test_a_dashboard_shows_the_stages_of_the_server_that_was_started_again(
    demo: AsyncOmni,
) -> None:
    with contextlib.ExitStack() as stack:
        small = stack.enter_context(AsyncOmni(pipeline=THINKER, executor="uni"))
        with serving(small) as server:
            known = stack.enter_context(RemoteOmni(server.url))
            dashboard = stack.enter_context(contextlib.closing(Dashboard(known)))
            row, head = dashboard.children[2], dashboard.children[1].children[0]
            assert ["thinker" in card.children[0].value for card in row.children] == [True]
        with serving(demo, port=server.port):
            asyncio.run(until(lambda: len(row.children) == 2))
            assert "painter" in row.children[1].children[0].value
            asyncio.run(until(lambda: "demo" in head.value))
        with serving(small, port=server.port):
            asyncio.run(until(lambda: len(row.children) == 1))


def test_a_session_is_not_connected_to_the_engine_that_it_would_stop_for_that() -> None:
    session = Session(Screen())
    engine = execute(session, "start --executor uni")
    execute(session, "serve --port 0")
    url = served.server_of(engine).url
    try:
        with pytest.raises(ArgumentError, match=r"is this session's own engine.*nothing was changed"):
            execute(session, f"connect {url} --replace")
        assert session.engine is engine
        with RemoteOmni(url) as known:
            assert known.status().stages[0].state == "AWAKE"
    finally:
        execute(session, "stop")


def test_a_server_that_listens_and_is_not_ready_may_still_be_starting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ServerLostError, match=r"within 0\.3 s; it may still be starting: .*Nothing was connected"):
            RemoteOmni(url, timeout=0.3)


def interrupted(handler: BaseHTTPRequestHandler) -> None:
    """The server hangs from now on, and whoever waits in the main thread presses Ctrl-C."""
    server: Any = handler.server
    server.silent.set()
    os.kill(os.getpid(), signal.SIGINT)
    server.freed.wait(30)


@pytest.mark.parametrize(
    ("line", "hangs", "told"),
    [
        ("sleep 0", "order", ""),
        ("status", "status", ""),
        ("sleep 0", "status", ": the sleep was not given yet"),
        ("borrow 0", "status", ": the borrow was not given yet"),
    ],
)
def test_an_interrupt_is_not_held_up_by_a_server_that_hangs_nor_is_leaving_it(
    odd: Rude, line: str, hangs: str, told: str
) -> None:
    session = Session(Screen())
    execute(session, f"connect {odd.url}")
    odd.on_order, odd.on_status = interrupted, interrupted if hangs == "status" else odd.on_status
    began_s = time.monotonic()
    with pytest.raises(
        InterruptedVerb, match=rf"interrupted{told}; http.* does not answer at the moment; %omni status"
    ):
        execute(session, line, "pass" if line == "borrow 0" else None)
    assert time.monotonic() - began_s < 3.3
    began_s = time.monotonic()
    execute(session, "stop")
    assert time.monotonic() - began_s < 2
    assert session.attached is None


def test_the_answers_of_an_order_are_kept_though_its_server_goes_at_once(demo: AsyncOmni, odd: Rude) -> None:
    acks = asyncio.run(demo.sleep([0]))
    asyncio.run(demo.wake_up([0]))

    def answer_and_go(handler: BaseHTTPRequestHandler) -> None:
        odd.on_status = lambda handler: handler.connection.shutdown(socket.SHUT_RDWR)
        tell(handler, {"status": "SUCCESS", "acks": msgspec.to_builtins(acks)})

    odd.on_order = answer_and_go
    session = Session(Screen())
    execute(session, f"connect {odd.url}")
    assert execute(session, "sleep 0 --out kept") == session.acks == session.frontend.variables["kept"]
    assert [ack.freed_bytes for ack in session.acks] == [ack.freed_bytes for ack in acks]
    execute(session, "stop")


LOOKS = {
    "goes": lambda handler: handler.connection.shutdown(socket.SHUT_RDWR),
    "hangs": lambda handler: handler.server.freed.wait(30),
    "refuses": lambda handler: tell(handler, {"error": {"message": "no key", "code": "UNAUTHORIZED"}}, 401),
    "babbles": lambda handler: tell(handler, {"stages": 7}),
}


def one_of_two(demo: AsyncOmni) -> list[OmniACK]:
    """What two ranks answer of which one was killed meanwhile."""
    (ack,) = asyncio.run(demo.sleep([0]))
    asyncio.run(demo.wake_up([0]))
    return [ack, replace(ack, rank=1, status="ERROR", freed_bytes=0, error_msg="rank 1 was killed")]


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize(("order", "kind"), [("sleep", SleepError), ("wake", WakeError)])
def test_the_answers_of_an_order_that_failed_are_raised_whatever_its_server_does_next(
    demo: AsyncOmni, odd: Rude, order: str, kind: type[SleepError | WakeError], look: str
) -> None:
    acks = one_of_two(demo)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        odd.on_status = LOOKS[look]
        tell(handler, {"status": "ERROR", "acks": msgspec.to_builtins(acks)}, 500)

    odd.on_order = answer
    with RemoteOmni(odd.url, timeout=0.5) as engine:
        call = engine.sleep([0]) if order == "sleep" else engine.wake_up([0])
        with pytest.raises(kind, match=rf"^{order} failed: stage 0 rank 1 was killed. Where the stages are") as raised:
            asyncio.run(call)
    assert raised.value.acks == acks


def test_the_answers_of_an_order_that_failed_are_kept_though_its_server_goes_at_once(
    demo: AsyncOmni, odd: Rude
) -> None:
    acks = one_of_two(demo)

    def answer_and_go(handler: BaseHTTPRequestHandler) -> None:
        odd.on_status = LOOKS["goes"]
        tell(handler, {"status": "ERROR", "acks": msgspec.to_builtins(acks)}, 500)

    odd.on_order = answer_and_go
    session = Session(Screen())
    execute(session, f"connect {odd.url}")
    with pytest.raises(SleepError, match="rank 1 was killed"):
        execute(session, "sleep 0 --out kept")
    assert session.acks == session.frontend.variables["kept"]
    assert [ack.freed_bytes for ack in session.acks] == [ack.freed_bytes for ack in acks] == [acks[0].freed_bytes, 0]
    execute(session, "stop")


def test_a_lease_whose_server_goes_says_what_may_be_asleep_and_the_line_that_wakes_it(demo: AsyncOmni) -> None:
    session = Session(Screen())
    with serving(demo) as server:
        execute(session, f"connect {server.url}")
        lease = borrowed([0], of=session)
        lease.__enter__()
    with pytest.raises(ServerLostError, match=r"may be asleep there: once it answers, %omni wake 0 wakes it; the code"):
        lease.__exit__(None, RuntimeError("of the user"), None)
    assert demo.status().stages[0].state == "ASLEEP"
    with serving(demo, port=server.port):
        execute(session, "wake 0")
    execute(session, "stop")
    assert demo.status().stages[0].state == "AWAKE"
