"""A server that comes back as another engine: told in one line, taken as it is, and no order meant for the first."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from omni_notebook.engine.remote import following, line
from omni_notebook.engine.remote.client import RemoteOmni
from omni_notebook.errors import ServerLostError
from omni_notebook.notebook.dashboard.parts import log_html
from omni_notebook.notebook.dashboard.sampler import Sampler
from omni_notebook.protocol import LinkEvent
from omni_notebook.verbs.registry import execute, verbs
from omni_notebook.verbs.session import Session
from tests.remote.screen import Screen
from tests.remote.served import rude, tell
from tests.remote.test_connection import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from http.server import BaseHTTPRequestHandler

    from tests.remote.served import Rude

SERVE = [sys.executable, "-m", "omni_notebook", "serve", "demo", "--enable-sleep-mode", "--port"]


@pytest.fixture
def odd() -> Iterator[Rude]:
    with rude() as server:
        server.name = "11.aa@here"
        yield server


def started(port: int) -> subprocess.Popen[str]:
    """A server process that answers."""
    process = subprocess.Popen([*SERVE, str(port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = process.stdout.readline()
    if "is served on" not in said:
        process.kill()
        raise AssertionError(said + process.communicate()[0])
    return process


def by(done: Callable[[], object], seconds: float = 20.0) -> None:
    deadline_s = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_server_that_was_killed_and_started_again_is_told_to_be_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "FIRST_WAIT_S", 0.05)
    monkeypatch.setattr(following, "LONGEST_WAIT_S", 0.2)
    port, session, links = free_port(), Session(Screen()), []
    first = started(port)
    again = None
    try:
        engine: Any = execute(session, f"connect 127.0.0.1:{port}")
        sampler = Sampler(engine)
        heard: Future[None] = engine.submit(_links(engine.subscribe(), links))
        job = execute(session, "generate a star --steps 1000 --bg")
        by(lambda: engine.status().stages[1].running)
        waiting = engine.submit(engine.sleep(mode="wait"))
        by(lambda: engine.status().stages[1].state == "FALLING_ASLEEP")
        os.kill(first.pid, signal.SIGKILL)
        with pytest.raises(ServerLostError, match="lost during the sleep"):
            waiting.result(20)
        with pytest.raises(ServerLostError, match="lost during the request"):
            job.result(20)
        again = started(port)
        session.frontend.text = ""
        with pytest.raises(ServerLostError, match=r"another engine answers.*The sleep was not given to this one: call"):
            engine.submit(engine.sleep([1])).result(20)
        status = execute(session, "status")
        told = f"(process {again.pid}; before: process {first.pid}): states and memory are its own"
        assert [str(stage.state) for stage in status.stages] == ["AWAKE", "AWAKE"]
        assert [told in note for note in status.notes].count(True) == 1
        assert session.frontend.text == ""  # it stands under the table
        execute(session, "sleep 1")
        execute(session, "wake 1")
        assert told not in session.frontend.text
        by(lambda: any(link.other for link in links))
        by(lambda: told in log_html(sampler._log) and "sleep L1" in log_html(sampler._log))
        assert [link.other for link in links].count(True) == 1
        assert {(ack.stage_id, ack.metadata["pid"]) for ack in sampler._log.last_acks} == {(1, again.pid)}
        assert not heard.done()
    finally:
        execute(session, "stop")
        for process in filter(None, (first, again)):
            process.kill()
            process.communicate()


async def _links(subscription: Any, found: list[LinkEvent]) -> None:
    async for event in subscription:
        if isinstance(event, LinkEvent):
            found.append(event)  # noqa: PERF401  (they are looked at meanwhile)


LOOKING = {"status", "dashboard", "logs", "help", "traceback", "start", "stop", "connect", "jobs", "history", "where"}
LOOKING |= {"serve"}
ORDERS = ["generate a star", "abort x", "sleep 0 --bg", "wake", "pause", "resume", "restart 0", "weights 0 folder"]
ORDERS += ["lora remove 1", "audit", "borrow"]


def test_a_verb_that_meets_another_engine_is_not_given_to_it_until_a_person_was_told(odd: Rude) -> None:
    assert {line.split()[0] for line in ORDERS} == verbs().keys() - LOOKING
    session = Session(Screen())
    execute(session, f"connect {odd.url}")
    odd.on_order = lambda handler: tell(handler, {"status": "SUCCESS"})
    for number, text in enumerate(ORDERS):
        odd.name, verb = f"{12 + number}.bb@there", text.split()[0]
        told = rf"\(process {12 + number}.*\. The {verb} was not given to this one: run the cell again if it is meant"
        with pytest.raises(ServerLostError, match=told):
            execute(session, text, "pass" if verb == "borrow" else None)
    assert odd.orders == []
    session.frontend.text = ""
    execute(session, "resume")
    odd.name = "11.aa@here"
    execute(session, "status")  # tells it, too
    execute(session, "resume")
    assert odd.orders == ["/v1/omni/resume"] * 2
    execute(session, "stop")
    assert "another engine answers" not in session.frontend.text


def test_an_order_says_for_which_engine_it_is_and_the_next_one_is_for_the_new_one(odd: Rude) -> None:
    meant = []

    def judge(handler: BaseHTTPRequestHandler) -> None:
        meant.append(handler.headers["X-Omni-Engine"])
        other = {"error": {"message": "no", "code": "OTHER_ENGINE"}}
        fits = meant[-1] == odd.name
        tell(handler, {"acks": []} if fits else other, 200 if fits else 409)

    odd.on_order = judge
    with RemoteOmni(odd.url) as engine:
        odd.name = "12.bb@there"
        with pytest.raises(ServerLostError, match=r"another engine .*The sleep was not given to this one: call again"):
            asyncio.run(engine.sleep([0]))
        assert asyncio.run(engine.sleep([0])) == []
        assert engine.host == "there"
        odd.name = "12.cc@there"
        engine.status()  # this side has heard of it, the caller has not
        with pytest.raises(ServerLostError, match="The sleep was not given to this one: call again"):
            asyncio.run(engine.sleep([0]))
        assert meant[3:] == []
        odd.name = "13.cc@there"
        with pytest.raises(ServerLostError, match="The request x was not given to this one"):
            asyncio.run(_first(engine))
        odd.name = "13.dd@there"
        assert "(process 13; which started it anew): states" in engine.status().notes[0]
    assert meant == ["11.aa@here", "12.bb@there", "12.cc@there"]


async def _first(engine: RemoteOmni) -> object:
    return await anext(engine.generate("a star", request_id="x"))


def test_an_order_is_not_waited_for_at_an_engine_that_does_not_have_it(
    odd: Rude, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "PROBE_S", 0.05)

    def hang(_handler: BaseHTTPRequestHandler) -> None:
        odd.name = "12.bb@there"
        odd.freed.wait(30)

    odd.on_order = hang
    with (
        RemoteOmni(odd.url) as engine,
        pytest.raises(ServerLostError, match=r"\(another engine answers there now\): what came of it is not known"),
    ):
        asyncio.run(engine.sleep([0]))
    assert odd.orders == ["/v1/omni/sleep"]
