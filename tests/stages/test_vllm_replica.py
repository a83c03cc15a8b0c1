"""When a vLLM replica gives requests to its host: at once where nothing comes before them, else after that."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from omni_notebook.errors import ArgumentError, WorkerDiedError
from omni_notebook.protocol import OmniSamplingParams, RequestState
from omni_notebook.stages.requests import StageOutput, StageRequest
from omni_notebook.stages.vllm_replica import VllmReplica
from omni_notebook.stages.vllm_scheduler import TextPrompt, VllmScheduler
from omni_notebook.stages.waiting import Signal
from omni_notebook.worker.vllm.wire import NEWS_AHEAD, TextOutput

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Host:
    """A host that answers when the test says so, and writes down what it gets in its order."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.asked: list[tuple[str, asyncio.Future[Any]]] = []
        self.refuses: str | None = None
        self.refusal: type[Exception] = ArgumentError
        self.room = 1000

    def listen(self, take: Callable[[Any, BaseException | None], None], kind: Any) -> None:
        assert kind == list[TextOutput]
        self.say = take

    @property
    def has_room(self) -> bool:
        return self.room > 0

    def when_room(self, look: Callable[[], None]) -> None:
        self.look = look

    def make_room(self, room: int) -> None:
        """It has read all that it was sent, and may be sent so much until it reads again."""
        self.room = room
        self.look()

    def tell_host(self, method: str, what: Any) -> None:
        name = getattr(what, "request_id", what)
        if name == self.refuses:
            msg = f"{name} has no form"
            raise self.refusal(msg)
        self.room -= 1
        self.got.append((method, name))

    async def ask_host(self, method: str, *args: Any) -> Any:
        self.got.append((method, *args))
        self.asked.append((method, asyncio.get_running_loop().create_future()))
        return await self.asked[-1][1]

    async def answer(self, method: str) -> None:
        """To the oldest question, which is this one; returns once it was taken."""
        asked, future = self.asked.pop(0)
        assert asked == method
        future.set_result(None)
        await _turns()


class Made:
    """A replica, loaded, with what it does written down."""

    def __init__(self) -> None:
        self.host = Host()
        self.outputs: dict[str, list[StageOutput]] = {}
        self.failures: list[BaseException] = []
        self.replica = VllmReplica(
            executor=self.host,
            scheduler=VllmScheduler(),
            changed=Signal(),
            weight_version=lambda: "v",
            on_failure=self.failures.append,
        )
        self.replica.loaded()

    def add(self, name: str) -> None:
        """A request of this name."""
        mine = self.outputs[name] = []
        self.replica.add(
            StageRequest(
                request_id=name, seed=1, params=OmniSamplingParams(), payload=TextPrompt((1,)), deliver=mine.append
            )
        )


async def _turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def run(test: Callable[[Made], Awaitable[None]]) -> None:
    async def main() -> None:
        made = Made()
        await _turns()
        try:
            await test(made)
        finally:
            await made.replica.stop()

    asyncio.run(main())


def news(name: str, *ids: int, ends: bool = False) -> TextOutput:
    return TextOutput(request_id=name, token_ids=ids, finish_reason="length" if ends else None)


def test_an_open_replica_gives_a_request_to_vllm_before_add_returns() -> None:
    async def test(made: Made) -> None:
        made.add("a")
        assert made.host.got == [("submit", "a")]
        made.host.say([news("a", 5), news("b", 6)], None)
        assert [one.token_ids for one in made.outputs["a"]] == [[5]]

    run(test)


def test_what_comes_while_vllm_stands_still_goes_to_it_after_the_thaw() -> None:
    async def test(made: Made) -> None:
        made.add("a")
        made.replica.close("pause")
        made.add("b")
        await _turns()
        assert made.host.got == [("submit", "a"), ("freeze",)]
        made.replica.reopen("pause")  # before it has come to rest
        made.add("c")
        await _turns()
        assert made.host.got[2:] == []
        made.host.say([news("a", 5)], None)
        assert [one.token_ids for one in made.outputs["a"]] == [[5]]  # it goes on until it has come to rest
        await made.host.answer("freeze")
        assert made.host.got[2:] == [("thaw", False)]
        made.add("d")
        assert made.host.got[3:] == []
        await made.host.answer("thaw")
        assert made.host.got[3:] == [("submit", "b"), ("submit", "c"), ("submit", "d")]
        made.add("e")
        assert made.host.got[6:] == [("submit", "e")]

    run(test)


def test_one_that_was_closed_again_during_the_thaw_submits_nothing_and_freezes() -> None:
    async def test(made: Made) -> None:
        made.replica.close("pause")
        await _turns()
        await made.host.answer("freeze")
        made.add("a")
        made.replica.reopen("pause")
        await _turns()
        made.replica.close("pause")
        await made.host.answer("thaw")
        assert made.host.got == [("freeze",), ("thaw", False), ("freeze",)]
        await made.host.answer("freeze")
        assert made.replica.at_rest
        assert made.replica.scheduler.queued == 1

    run(test)


def test_an_id_that_was_aborted_is_given_again_only_after_vllm_has_let_go_of_it() -> None:
    async def test(made: Made) -> None:
        made.add("a")
        assert made.replica.abort("a")
        assert made.outputs["a"][-1].state == RequestState.ABORTED
        made.add("a")
        made.host.say([news("a", 5)], None)  # of the one before
        await _turns()
        made.add("b")
        assert made.outputs["a"] == []
        assert made.host.got == [("submit", "a"), ("abort", ["a"])]
        await made.host.answer("abort")
        assert made.host.got[2:] == [("submit", "a"), ("submit", "b")]
        made.host.say([news("a", 7, ends=True)], None)
        assert [one.token_ids for one in made.outputs["a"]] == [[7]]

    run(test)


async def _thaw(made: Made) -> None:
    """Let the replica be at a thaw that the host has not answered."""
    made.replica.close("pause")
    await _turns()
    await made.host.answer("freeze")
    made.replica.reopen("pause")
    await _turns()


async def _abort(made: Made) -> None:
    """Let it be at an abort that the host has not answered."""
    made.add("z")
    made.replica.abort("z")
    await _turns()


@pytest.mark.parametrize("order", [_thaw, _abort])
def test_an_id_that_is_aborted_during_an_order_goes_again_only_after_its_abort_and_holds_no_other_back(
    order: Callable[[Made], Awaitable[None]],
) -> None:
    async def test(made: Made) -> None:
        made.add("a")
        await order(made)
        before = len(made.host.got)
        assert made.replica.abort("a")
        made.add("a")
        made.add("b")
        await made.host.answer(order.__name__.removeprefix("_"))
        made.host.say([news("a", 5)], None)  # of the one before
        assert made.outputs["a"] == []
        assert made.host.got[before:] == [("submit", "b"), ("abort", ["a"])]
        await made.host.answer("abort")
        assert made.host.got[before + 2 :] == [("submit", "a")]
        made.host.say([news("a", 7, ends=True)], None)
        assert [one.token_ids for one in made.outputs["a"]] == [[7]]

    run(test)


def test_the_host_hears_how_often_news_were_taken() -> None:
    async def test(made: Made) -> None:
        made.add("a")
        for token in range(2 * NEWS_AHEAD):
            made.host.say([news("a", token)], None)
        half = NEWS_AHEAD // 2
        assert made.host.got[1:] == [("taken", half)] * 4
        assert made.outputs["a"][-1].token_ids == list(range(2 * NEWS_AHEAD))

    run(test)


@pytest.mark.parametrize("refusal", [ArgumentError, OSError])
def test_a_request_that_can_not_be_sent_ends_alone(refusal: type[Exception]) -> None:
    async def test(made: Made) -> None:
        made.host.refuses, made.host.refusal = "b", refusal
        for name in "abc":
            made.add(name)
        assert made.host.got == [("submit", "a"), ("submit", "c")]
        (end,) = made.outputs["b"]
        assert end.state == RequestState.FAILED
        assert "b has no form; vLLM was not asked" in str(end.error)
        assert made.failures == []

    run(test)


def test_no_more_is_sent_than_the_host_takes_and_the_rest_is_queued() -> None:
    async def test(made: Made) -> None:
        made.host.room = 2
        for name in "abcdef":
            made.add(name)
        await _turns()
        assert made.host.got == [("submit", "a"), ("submit", "b")]
        assert (made.replica.scheduler.running, made.replica.scheduler.queued) == (2, 4)
        assert made.replica.abort("d")
        assert made.outputs["d"][-1].state == RequestState.ABORTED
        made.host.make_room(1)
        await _turns()
        assert made.host.got[2:] == [("submit", "c")]
        made.host.make_room(10)
        await _turns()
        assert made.host.got[3:] == [("submit", "e"), ("submit", "f")]
        made.add("g")
        assert made.host.got[5:] == [("submit", "g")]

    run(test)


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        ("stop", RequestState.FINISHED),
        ("length", RequestState.FINISHED),
        ("repetition", RequestState.FINISHED),
        ("abort", RequestState.ABORTED),
        ("error", RequestState.FAILED),
    ],
)
def test_only_what_vllm_wrote_to_the_end_is_finished(reason: str, state: RequestState) -> None:
    async def test(made: Made) -> None:
        made.add("a")
        made.host.say([news("a", 5)], None)
        made.host.say([TextOutput(request_id="a", token_ids=(6,), finish_reason=reason)], None)
        end = made.outputs["a"][-1]
        assert (end.final, end.state) == (True, state)
        assert (end.error is not None) == (state == RequestState.FAILED)
        if state == RequestState.FAILED:
            assert "request a" in str(end.error)
        else:
            assert (end.token_ids, end.finish_reason) == ([5, 6], reason)
        assert made.replica.drained
        assert made.failures == []

    run(test)


@pytest.mark.parametrize(
    ("error", "known"), [(WorkerDiedError("died", stage_id=0, rank=0), []), (ValueError("not followed"), [0])]
)
def test_what_the_host_could_not_follow_fails_the_stage_once_and_its_death_is_told_by_others(
    error: Exception, known: list[int]
) -> None:
    async def test(made: Made) -> None:
        made.add("a")
        made.host.say(None, error)
        made.host.say(None, error)
        assert made.failures == [error for _ in known]
        assert made.replica.at_rest
        made.add("b")
        await _turns()
        assert made.host.got == [("submit", "a")]

    run(test)


def test_one_that_was_stopped_delivers_nothing_more() -> None:
    async def test(made: Made) -> None:
        made.add("a")
        await made.replica.stop()
        made.host.say([news("a", 5)], None)
        assert made.outputs["a"] == []
        assert list(made.replica.scheduler.request_ids()) == ["a"]

    run(test)
