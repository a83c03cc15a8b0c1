"""A client and its server: who answers, what a lost connection means, what a wait is bounded by, how it ends."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.engine.remote import following, line, servers
from omni_notebook.engine.remote.client import RemoteOmni
from omni_notebook.errors import (
    ArgumentError,
    ConfigError,
    DeadlineError,
    EngineClosedError,
    ServerLostError,
    StageFailedError,
    UnsupportedError,
)
from omni_notebook.protocol import LinkEvent, MemoryState, StateEvent
from tests.engine.engine_helpers import PROMPT, collect, reset, slow, until
from tests.remote.served import Contract, certificate, rude, serving, tell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from http.server import BaseHTTPRequestHandler
    from pathlib import Path

    from tests.remote.served import Rude

ALONE = """
import asyncio, sys
from omni_notebook import RemoteOmni
from omni_notebook.errors import AsleepError

async def main(url):
    async with RemoteOmni(url) as engine:
        acks = await engine.sleep([0], level=2)
        assert [ack.ok for ack in acks] and acks[0].freed_bytes > 0, acks
        try:
            async for output in engine.generate("a star", admission_timeout=0):
                raise AssertionError(output)
        except AsleepError as error:
            assert "wake_up([0])" in str(error), error
        await engine.wake_up([0])
        outputs = [output async for output in engine.generate("a star", sampling_params={"num_inference_steps": 1})]
        print(outputs[-1].images[0].size)

asyncio.run(main(sys.argv[1]))
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module", params=["uni"])
def shared_engine(request: pytest.FixtureRequest) -> Iterator[Contract]:
    with (
        AsyncOmni("demo", executor=request.param) as embedded,
        serving(embedded) as server,
        Contract(server.url, embedded) as engine,
    ):
        yield engine


@pytest.fixture
def odd() -> Iterator[Rude]:
    with rude() as server:
        yield server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ------------------------------------------------------------------------------------ connecting


def test_where_nobody_listens_it_is_refused_in_one_line() -> None:
    with pytest.raises(
        ServerLostError, match=r"does not answer \(.+\); is a server running there.*Nothing was"
    ) as caught:
        RemoteOmni(f"http://127.0.0.1:{free_port()}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://a b", "http://user:pass@host", 7, "http://host?x=1"])
def test_what_can_be_no_url_is_refused(url: Any) -> None:
    with pytest.raises(ArgumentError, match="nothing was connected"):
        RemoteOmni(url)


def test_a_key_is_asked_for_and_taken(engine: Contract) -> None:
    with serving(engine.embedded, api_key="secret") as server:
        with pytest.raises(ConfigError, match="wants a key: give api_key"):
            RemoteOmni(server.url)
        with pytest.raises(ConfigError, match="does not take this key"):
            RemoteOmni(server.url, "other")
        with pytest.raises(ConfigError, match="no header carries"):
            RemoteOmni(server.url, "two words")
        with RemoteOmni(server.url, "secret") as known:
            assert known.status().model == "demo"
            assert "secret" not in repr(vars(known))


def test_the_other_scheme_is_named_where_it_is_spoken(engine: Contract, odd: Rude, tmp_path: Path) -> None:
    secure = engine.url.replace("http:", "https:")
    with pytest.raises(ConfigError, match=rf"speaks plain http: connect to {engine.url}; nothing was connected"):
        RemoteOmni(secure)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate(tmp_path))
    odd.socket = context.wrap_socket(odd.socket, server_side=True, do_handshake_on_connect=False)
    with pytest.raises(ConfigError, match=rf"speaks TLS: connect to {odd.url.replace('http:', 'https:')}; nothing"):
        RemoteOmni(odd.url)
    with pytest.raises(ServerLostError, match=r"does not answer \(TLS: self.signed certificate\)"):
        RemoteOmni(odd.url.replace("http:", "https:"))


def test_the_loopback_has_another_address_too(engine: Contract) -> None:
    try:
        serve = serving(engine.embedded, host="[::1]")
        with serve as server:
            assert server.url == f"http://[::1]:{server.port}"
            for url in (server.url, f"[::1]:{server.port}"):
                with RemoteOmni(url) as known:
                    assert (known.url, known.host) == (server.url, None)
                    assert [ack.ok for ack in asyncio.run(known.sleep([0]))] == [True]
                    asyncio.run(known.wake_up([0]))
    except ConfigError as error:
        # a machine without an IPv6 loopback
        assert "can not listen on [::1]:0: Cannot assign requested address" in str(error)  # noqa: PT017


def test_what_is_no_such_server_is_refused(odd: Rude, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "VERSION", "/elsewhere")
    monkeypatch.setattr(servers, "OMNI", "/elsewhere")
    with pytest.raises(ConfigError, match=r"neither a server of omni_notebook nor of vLLM-Omni.*404"):
        RemoteOmni(odd.url)


def test_a_process_without_torch_sleeps_wakes_and_generates(engine: Contract) -> None:
    run = subprocess.run(
        [sys.executable, "-c", ALONE, engine.url], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "(64, 64)\n", "")


def test_the_machine_is_the_one_that_the_server_names(engine: Contract, odd: Rude) -> None:
    assert engine.host is None
    odd.host = "gpu-7"  # a tunnel's near end: the URL is this machine's, the server is not
    with RemoteOmni(odd.url) as far:
        assert (far.host, repr(far)) == ("gpu-7", f"<RemoteOmni {odd.url} on gpu-7>")
    odd.host = None
    with RemoteOmni(odd.url) as unsaid:
        assert unsaid.host is None


# ---------------------------------------------------------------------------------- lost, or late


def test_an_order_whose_connection_is_lost_may_go_on_and_is_sent_once(odd: Rude) -> None:
    def close(handler: BaseHTTPRequestHandler) -> None:
        handler.connection.shutdown(socket.SHUT_RDWR)

    odd.on_order = close
    with RemoteOmni(odd.url) as engine:
        with pytest.raises(
            ServerLostError, match=r"lost during the sleep.*may go on there, and was not sent again.*status"
        ):
            asyncio.run(engine.sleep([0]))
        with pytest.raises(ServerLostError, match=r"lost during the request x .*ends there with its client"):
            asyncio.run(collect(engine, request_id="x"))
    assert odd.orders == ["/v1/omni/sleep", "/v1/omni/generate"]


def test_an_order_to_a_server_that_has_gone_is_not_sent(engine: Contract) -> None:
    with serving(engine.embedded) as server:
        known = RemoteOmni(server.url)
    with known:
        with pytest.raises(ServerLostError, match=r"nobody answers at .*: the wake was not sent"):
            asyncio.run(known.wake_up([0]))
        with pytest.raises(ServerLostError, match=r"does not answer \(Connection refused\); nothing was changed there"):
            known.status()


def test_a_long_order_is_waited_for_as_long_as_the_server_is_there(odd: Rude, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "PROBE_S", 0.05)

    def late(handler: BaseHTTPRequestHandler) -> None:
        odd.freed.wait(1.0)
        tell(handler, {"status": "SUCCESS", "acks": []})

    odd.on_order = late
    with RemoteOmni(odd.url) as engine:
        assert asyncio.run(engine.sleep([0])) == []


def test_a_server_that_hangs_is_not_waited_for_for_ever(odd: Rude, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "PROBE_S", 0.05)

    def hang(_handler: BaseHTTPRequestHandler) -> None:
        odd.silent.set()
        odd.freed.wait(30)

    odd.on_order = hang
    began_s = time.monotonic()
    with RemoteOmni(odd.url, timeout=0.5) as engine:
        with pytest.raises(ServerLostError, match=r"no answer to 3 probes.*may go on there"):
            asyncio.run(engine.sleep([0]))
        with pytest.raises(ServerLostError, match=r"did not answer within 0\.5 s"):
            engine.status()
    assert time.monotonic() - began_s < 10
    assert odd.orders == ["/v1/omni/sleep"]


def test_an_order_with_a_bound_of_its_own_is_waited_for_a_margin_longer(
    odd: Rude, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "MARGIN_S", 0.2)
    odd.on_order = lambda _handler: odd.freed.wait(30)
    with RemoteOmni(odd.url) as engine, pytest.raises(DeadlineError, match=r"within its 0\.1 s and 0\.2 s more.*go on"):
        asyncio.run(engine.wake_up([0], timeout=0.1))


@pytest.mark.parametrize("body", [{"status": "SUCCESS"}, {"acks": [7]}, {"acks": [{"status": 3}]}])
def test_an_answer_that_is_none_is_an_error_that_says_where_to_look(odd: Rude, body: Any) -> None:
    odd.on_order = lambda handler: tell(handler, body)
    with RemoteOmni(odd.url) as engine, pytest.raises(ServerLostError, match="with something else than expected"):
        asyncio.run(engine.sleep([0]))


def test_an_order_whose_client_leaves_goes_on_unless_it_asked_for_the_other(engine: Contract) -> None:
    async def scenario(headers: dict[str, str]) -> str:
        await engine.pause_generation(mode="keep", stage_ids=[1])
        with slow(engine, 1, 0.4, "prepare_sleep"):
            with pytest.raises(httpx.ReadTimeout):
                async with httpx.AsyncClient(timeout=0.2) as client:
                    await client.post(f"{engine.url}/v1/omni/sleep", json={"stage_ids": [1]}, headers=headers)
            await until(lambda: engine.status().stages[1].state in {"AWAKE", "ASLEEP"})
            return engine.status().stages[1].state

    assert asyncio.run(scenario({})) == "ASLEEP"
    asyncio.run(engine.wake_up())
    assert asyncio.run(scenario({"X-Omni-Leave": "cancel"})) == "AWAKE"


# ------------------------------------------------------------------------------------- events


def test_a_broken_stream_of_events_is_told_and_what_moved_meanwhile_is_found_out(
    engine: Contract, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "FIRST_WAIT_S", 0.02)
    port = free_port()
    found: list[Any] = []

    async def scenario(known: RemoteOmni) -> None:
        subscription = known.subscribe()

        async def hear() -> None:
            async for event in subscription:
                found.append(event)  # noqa: PERF401  (they are looked at meanwhile)

        hearing = asyncio.create_task(hear())
        await known.wake_up()
        await asyncio.to_thread(first.__exit__, None, None, None)
        await until(lambda: any(isinstance(event, LinkEvent) for event in found))
        await engine.embedded.sleep([1])
        with serving(engine.embedded, port=port):
            await until(lambda: found and isinstance(found[-1], StateEvent) and found[-1].reason == following.FOUND)
            subscription.close()
            await hearing

    first = serving(engine.embedded, port=port)
    server = first.__enter__()
    with RemoteOmni(server.url) as known:
        asyncio.run(scenario(known))
    links = [event for event in found if isinstance(event, LinkEvent)]
    assert [link.connected for link in links] == [False, True] * (len(links) // 2)
    assert links[-1].reason == following.AGAIN
    assert (found[-1].stage_id, found[-1].state, found[-1].level) == (1, MemoryState.ASLEEP, 1)


def test_a_subscription_hears_the_order_that_comes_right_after_it_and_ends_with_the_connection(
    engine: Contract,
) -> None:
    async def scenario() -> list[str]:
        with RemoteOmni(engine.url) as known:
            subscription = known.subscribe()
            await known.sleep([0])
            await known.wake_up([0])
            heard = []
            async for event in subscription:
                heard.append(type(event).__name__)
                if heard.count("AckEvent") == 2:
                    known.shutdown()
            return heard

    heard = asyncio.run(scenario())
    assert heard[0] == "StateEvent"
    assert heard.count("AckEvent") == 2


# ------------------------------------------------------------------------------ calls of its own


def test_tensors_are_refused_before_anything_is_sent(odd: Rude) -> None:
    def endless() -> Iterator[tuple[str, Any]]:
        pytest.fail("nothing may be read")
        yield

    with RemoteOmni(odd.url) as engine:
        for source in ({"a": 1}, endless()):
            with pytest.raises(UnsupportedError, match=r"takes a folder on the server's machine.*Nothing was sent"):
                asyncio.run(engine.load_weights(1, source))
        with pytest.raises(UnsupportedError, match="keeps its own history"):
            asyncio.run(engine.record_audit("PASS", {}))
    assert odd.orders == []


def test_bounds_beyond_those_that_a_server_takes_are_its_own(engine: Contract) -> None:
    async def scenario() -> None:
        assert [ack.ok for ack in await engine.sleep([0], timeout=float("inf"))] == [True]
        assert [ack.ok for ack in await engine.wake_up([0], timeout=10**9)] == [True]
        with slow(engine, 0, 0.3, "prepare_sleep"):
            one = asyncio.create_task(engine.sleep([0]))
            await until(lambda: engine.status().stages[0].state == "FALLING_ASLEEP")
            with pytest.raises(DeadlineError, match="another order held stage 0"):
                await engine.wake_up([0], timeout=0)
            await one
        await engine.wake_up([0])
        params = {"num_inference_steps": 1}
        made = await collect(engine, sampling_params=params, timeout=float("inf"), admission_timeout=10**9)
        assert made[-1].images

    asyncio.run(scenario())


def test_a_folder_becomes_the_weights(engine: Contract, other_weights: Any) -> None:
    asyncio.run(engine.load_weights(1, other_weights, version="other"))
    assert engine.status().stages[1].weight_version == "other"


def test_health_and_logs_are_the_engines(engine: Contract) -> None:
    async def scenario() -> None:
        await engine.check_health()
        with pytest.raises(ArgumentError, match="there is no rank 3"):
            engine.logs(0, 3)
        assert engine.logs(0) == []
        fail = engine._core.stages[0].fail
        engine.embedded._loop.call(lambda: fail(RuntimeError("for this test")))
        await until(lambda: engine.status().stages[0].state == "FAILED")
        with pytest.raises(StageFailedError, match=r"restart\(0\)"):
            await engine.check_health()
        await reset(engine.embedded)

    asyncio.run(scenario())


def test_shutdown_ends_what_waits_and_leaves_no_thread_and_the_engine_runs_on(engine: Contract) -> None:
    before = set(threading.enumerate())
    known = RemoteOmni(engine.url)

    async def scenario() -> None:
        request = asyncio.create_task(collect(known, sampling_params={"num_inference_steps": 1000}))
        await until(lambda: engine.status().stages[1].running)
        known.subscribe()
        await asyncio.to_thread(known.shutdown)
        with pytest.raises(EngineClosedError, match=r"this connection was closed; the engine at .* was left as it is"):
            await request
        await until(lambda: not engine.status().stages[1].running)

    asyncio.run(scenario())
    known.shutdown()
    assert {thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("omni-")} == set()
    assert (known.status().closed, known.status().left_at) == (True, engine.url)
    for call in (lambda: asyncio.run(known.sleep()), lambda: asyncio.run(collect(known)), lambda: known.logs(0)):
        with pytest.raises(EngineClosedError, match="connects again"):
            call()
    assert asyncio.run(collect(engine, PROMPT))[-1].images


def test_a_client_that_is_dropped_closes_its_connection(engine: Contract) -> None:
    names = [thread.name for thread in threading.enumerate()]
    known = RemoteOmni(engine.url)
    asyncio.run(known.is_paused())
    del known
    asyncio.run(until(lambda: [thread.name for thread in threading.enumerate()] == names))
