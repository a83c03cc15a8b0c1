"""A slow way, one that breaks, one that goes silent: no wait is endless, no order is sent twice, and errors say so."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.engine.remote import following, line
from omni_notebook.engine.remote.client import RemoteOmni
from omni_notebook.errors import DeadlineError, ServerLostError, UnsupportedError
from omni_notebook.protocol import LinkEvent, StateEvent
from tests.engine.engine_helpers import collect, reset, slow, until
from tests.remote.proxy import proxied
from tests.remote.served import rude, serving, tell

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_notebook.server.serving import Server
    from tests.remote.proxy import Proxy

QUICK = {"num_inference_steps": 1}
NOT_THERE = "the server answers, and does not have it under way"
GOES_ON = r"may go on there, and was not sent again\. engine\.status\(\)"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[AsyncOmni, Server]]:
    with AsyncOmni("demo") as embedded, serving(embedded) as server:
        yield embedded, server


@pytest.fixture
def embedded(served: tuple[AsyncOmni, Server]) -> Iterator[AsyncOmni]:
    asyncio.run(reset(served[0]))
    yield served[0]
    asyncio.run(reset(served[0]))


@pytest.fixture
def way(served: tuple[AsyncOmni, Server], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setattr(line, "PROBE_S", 0.1)
    monkeypatch.setattr(line, "MARGIN_S", 0.3)
    monkeypatch.setattr(following, "FIRST_WAIT_S", 0.02)
    with proxied(served[1].port) as proxy:
        yield proxy


@pytest.fixture
def engine(embedded: AsyncOmni, way: Proxy) -> Iterator[RemoteOmni]:
    with RemoteOmni(way.url, timeout=2.0) as engine:
        yield engine


def sent(way: Proxy) -> list[str]:
    """The orders that were sent, without what only looks."""
    return [one.removeprefix("POST /v1/omni/") for one in way.asked if one.startswith("POST")]


def states(embedded: AsyncOmni) -> list[str]:
    return [str(stage.state) for stage in embedded.status().stages]


def test_over_a_slow_way_everything_is_what_it_is_and_each_order_is_sent_once(
    engine: RemoteOmni, way: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "PROBE_S", 1.0)
    way.delay_s = 0.2

    async def scenario() -> None:
        async with engine.subscribe() as events:
            acks = await engine.sleep([0, 1])
            assert [(ack.stage_id, ack.ok) for ack in acks] == [(0, True), (1, True)]
            assert [str(stage.state) for stage in engine.status().stages] == ["ASLEEP", "ASLEEP"]
            await engine.wake_up()
            assert (await collect(engine, request_id="slow", sampling_params=QUICK))[-1].images[0].size == (64, 64)
            heard = [type(await anext(events)).__name__ for _ in range(6)]
            assert "StateEvent" in heard
            assert "LinkEvent" not in heard

    asyncio.run(scenario())
    assert sent(way) == ["sleep", "wakeup", "generate"]


@pytest.mark.parametrize("n_bytes", [0, 120, 700], ids=["before the answer", "in its head", "in its body"])
def test_an_answer_that_is_cut_leaves_an_order_that_was_carried_out_and_is_not_sent_again(
    engine: RemoteOmni, embedded: AsyncOmni, way: Proxy, n_bytes: int
) -> None:
    way.cut = "/v1/omni/sleep", n_bytes
    with pytest.raises(ServerLostError, match=rf"lost during the sleep \(.+\): it {GOES_ON}"):
        asyncio.run(engine.sleep([1]))
    asyncio.run(until(lambda: states(embedded)[1] in {"ASLEEP", "AWAKE"}))
    assert [str(stage.state) for stage in engine.status().stages] == states(embedded)
    assert sent(way) == ["sleep"]


def test_an_order_that_never_arrived_says_the_same_and_changed_nothing(
    engine: RemoteOmni, embedded: AsyncOmni, way: Proxy
) -> None:
    way.swallow = "/v1/omni/sleep"
    with pytest.raises(ServerLostError, match=rf"lost during the sleep \(.+\): it {GOES_ON}"):
        asyncio.run(engine.sleep([1]))
    assert states(embedded) == ["AWAKE", "AWAKE"]
    assert sent(way) == ["sleep"]


def test_outputs_that_are_cut_end_with_their_request(engine: RemoteOmni, embedded: AsyncOmni, way: Proxy) -> None:
    way.cut = "/v1/omni/generate", 700
    long = {"num_inference_steps": 900}
    with pytest.raises(
        ServerLostError, match=r"lost during the request cut \(it was closed there, half-way\): it ends there with"
    ):
        asyncio.run(collect(engine, request_id="cut", sampling_params=long))
    asyncio.run(until(lambda: not any(stage.running for stage in embedded.status().stages)))
    assert sent(way) == ["generate"]


def test_events_that_are_cut_are_told_and_taken_up_again(engine: RemoteOmni, embedded: AsyncOmni, way: Proxy) -> None:
    found: list[Any] = []

    async def hear(events: Any) -> None:
        async for event in events:
            found.append(event)  # noqa: PERF401  (they are looked at meanwhile)

    async def scenario() -> None:
        events = engine.subscribe()
        hearing = asyncio.create_task(hear(events))
        await engine.resume_generation()
        way.cut = "/v1/omni/events", 0  # with the next event, of which nothing comes
        await embedded.sleep([1])
        await until(lambda: [event.connected for event in found if isinstance(event, LinkEvent)] == [False, True])
        await until(lambda: [event for event in found if isinstance(event, StateEvent) and event.state == "ASLEEP"])
        events.close()
        await hearing

    asyncio.run(scenario())
    assert [event.other for event in found if isinstance(event, LinkEvent)] == [False, False]


def test_a_way_that_goes_silent_is_given_up_in_time(engine: RemoteOmni, embedded: AsyncOmni, way: Proxy) -> None:
    found: list[Any] = []

    async def hear(events: Any) -> None:
        async for event in events:
            found.append(event)  # noqa: PERF401

    async def scenario() -> None:
        events = engine.subscribe()
        hearing = asyncio.create_task(hear(events))
        await engine.resume_generation()
        way.deaf = True
        began_s = time.monotonic()
        with pytest.raises(ServerLostError, match=rf"lost during the sleep \(no answer to 3 probes\): it {GOES_ON}"):
            await engine.sleep([1])
        with pytest.raises(
            ServerLostError, match=r"lost during the request x \(no answer to 3 probes\): it ends there"
        ):
            await collect(engine, request_id="x")
        with pytest.raises(ServerLostError, match=r"did not answer within 2 s; nothing was changed there"):
            engine.status()
        assert time.monotonic() - began_s < 2 * 2 * 3 * 0.1 + 2 + 4
        await until(lambda: any(isinstance(event, LinkEvent) for event in found))
        events.close()
        await hearing

    asyncio.run(scenario())
    assert states(embedded) == ["AWAKE", "AWAKE"]


def test_where_only_the_orders_own_connection_is_silent_its_bound_ends_the_wait(
    engine: RemoteOmni, way: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "PROBE_S", 5.0)
    way.deaf_to = "/v1/omni/sleep"
    with pytest.raises(
        DeadlineError, match=r"did not answer the sleep within its 0\.2 s and 0\.3 s more: it may go on"
    ):
        asyncio.run(engine.sleep([1], timeout=0.2))
    assert sent(way) == ["sleep"]


def test_an_order_that_was_swallowed_is_not_waited_for_though_it_has_no_bound(
    engine: RemoteOmni, embedded: AsyncOmni, way: Proxy
) -> None:
    way.deaf_to = "/v1/omni/sleep"
    with pytest.raises(
        ServerLostError, match=rf"\({NOT_THERE}\): it has ended, or never arrived, and was not sent again"
    ):
        asyncio.run(engine.sleep([1]))
    assert states(embedded) == ["AWAKE", "AWAKE"]
    assert sent(way) == ["sleep"]


@pytest.mark.parametrize("call", ["sleep", "generate"])
def test_an_answer_that_does_not_come_is_not_waited_for_once_its_order_has_ended(
    engine: RemoteOmni, embedded: AsyncOmni, way: Proxy, call: str
) -> None:
    way.mute_to = f"/v1/omni/{call}"
    with pytest.raises(
        ServerLostError, match=rf"\({NOT_THERE}\): it has ended( there)?, or never arrived, and was not sent again"
    ) as lost:
        asyncio.run(engine.sleep([1]) if call == "sleep" else collect(engine, sampling_params=QUICK))
    assert ("%omni status" in str(lost.value)) == (call == "sleep")  # which tells nothing of a request
    assert states(embedded) == ["AWAKE", "ASLEEP" if call == "sleep" else "AWAKE"]
    assert sent(way) == [call]


def test_an_order_that_takes_long_is_waited_for_while_it_is_under_way(
    engine: RemoteOmni, embedded: AsyncOmni, way: Proxy
) -> None:
    with slow(embedded, 1, 1.5, "prepare_sleep"):
        assert [ack.ok for ack in asyncio.run(engine.sleep([1]))] == [True]
    assert way.asked.count("GET /v1/omni/version") > line.MISSES + 1


def test_a_stream_of_events_that_goes_silent_is_taken_up_anew(
    embedded: AsyncOmni, way: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "SILENT_S", 0.4)

    async def scenario(engine: RemoteOmni) -> list[LinkEvent]:
        events = engine.subscribe()
        await engine.resume_generation()
        way.mute_to = "/v1/omni/events"
        links = []
        async for event in events:
            if isinstance(event, LinkEvent):
                links.append(event)
                way.mute_to = None
                if event.connected:
                    return links
        return links

    with RemoteOmni(way.url) as engine:
        broke, there = asyncio.run(asyncio.wait_for(scenario(engine), 20))
    assert (broke.connected, there.connected) == (False, True)
    assert "nothing came for 0.4 s" in broke.reason


def test_an_audit_that_is_cut_ends_there_with_its_stages_awake(
    engine: RemoteOmni, embedded: AsyncOmni, way: Proxy
) -> None:
    way.cut = "/v1/omni/audit", 600
    with pytest.raises(ServerLostError, match=r"lost during the audit .*: it ends there with its client, and was not"):
        asyncio.run(engine.audit_there({"stage_ids": [0], "sampling_params": QUICK, "cycles": 500}))
    asyncio.run(until(lambda: states(embedded) == ["AWAKE", "AWAKE"]))
    assert sent(way) == ["audit"]


def test_an_older_server_is_told_to_have_no_such_call_in_one_line_each() -> None:
    with rude() as old:
        old.told = None
        old.on_order = lambda handler: tell(handler, {"error": {"message": "Not Found", "code": "HTTP"}}, 404)
        with RemoteOmni(old.url) as engine:
            assert (engine.host, engine.status().model) == (None, "rude")
            for call, path in (
                (lambda: asyncio.run(collect(engine)), "POST http.*/v1/omni/generate"),
                (lambda: engine.logs(0), "GET http.*/v1/omni/logs"),
                (lambda: asyncio.run(engine.audit_there({})), "POST http.*/v1/omni/audit"),
                (lambda: asyncio.run(engine.pin_lora(1)), "POST http.*/v1/omni/loras/1/pin"),
            ):
                with pytest.raises(
                    UnsupportedError, match=rf"^{path} answered 404: the server has no such call.*there$"
                ):
                    call()
