"""The host process: orders on its own loop in their order, news unasked and bounded, faults heard, an end in order."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from omni_notebook.errors import (
    ArgumentError,
    DeadlineError,
    EngineClosedError,
    OmniError,
    RemoteWorkerError,
    UnsupportedError,
    WorkerDiedError,
)
from omni_notebook.executors import hosted
from omni_notebook.executors.mp.wire import FRAMES_A_TURN
from omni_notebook.protocol import RankId
from omni_notebook.worker.vllm.wire import NEWS_AHEAD, TextOutput, TextRequest, packed
from tests.executors.executor_helpers import fds, make_specs, until
from tests.executors.talking_host import BARE, FORGETFUL, HANGING, HELD, TALKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


FIRST = RankId(stage_id=0, replica=0, rank=0)


class Heard(list[Any]):
    """What a host said unasked: values, and an error at the end."""

    def take(self, value: Any, error: BaseException | None) -> None:
        self.append(value if error is None else error)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a test with a host that listens, and end the host."""
    monkeypatch.setattr(hosted, "warn_if_untested", lambda _version: None)

    def run(host: str, test: Callable[[hosted.HostedExecutor, Heard], Awaitable[None]], kind: Any = Any) -> None:
        async def main() -> None:
            executor, heard = hosted.HostedExecutor(make_specs(1), host=host), Heard()
            executor.listen(heard.take, kind)
            try:
                await asyncio.wait_for(test(executor, heard), 30)
            finally:
                executor.shutdown()
                await until(lambda: executor.ended, 10)

        asyncio.run(main())

    return run


def request(name: str, tokens: int, **known: Any) -> TextRequest:
    """One for the host."""
    given = {"prompt": (1,), "generated": (), "seed": 1, "temperature": 0.0, "top_p": 1.0, "top_k": 0}
    return TextRequest(request_id=name, max_tokens=tokens, stop_token_ids=(), **{**given, **known})


async def ended(executor: hosted.HostedExecutor, but: int = 0) -> None:
    """Wait until all requests but so many have ended in the host."""
    while await executor.ask_host("running") > but:  # noqa: ASYNC110  (the host signals nothing here)
        await asyncio.sleep(0.005)


def test_orders_before_and_after_the_loop_reads_them_keep_their_order(serve: Callable[..., None]) -> None:
    async def test(executor: hosted.HostedExecutor, _heard: Heard) -> None:
        orders = [executor.ask_host("start")]
        orders += [executor.ask_host("note", number, 0.004) for number in range(50)]
        await asyncio.gather(*orders)
        for number in range(50, 80):
            executor.tell_host("note", number)
        await executor.ask_host("note", 80)
        noted = await executor.ask_host("noted")
        assert [value for value, _ in noted] == list(range(81))
        assert noted[0][1] == "orders"
        assert {thread for _, thread in noted[50:]} == {"talking"}  # nobody else was woken for them

    serve(TALKING, test)


def test_what_was_told_together_is_followed_in_one_turn_of_the_loop_but_no_more_than_so_much(
    serve: Callable[..., None],
) -> None:
    async def test(executor: hosted.HostedExecutor, _heard: Heard) -> None:
        await executor.ask_host("start")
        await executor.ask_host("note", 0)  # the loop reads
        executor.tell_host("note", 1, 0.5)  # all that follows comes meanwhile
        for number in range(FRAMES_A_TURN + 10):
            executor.tell_host("mark", number)
        noted = (await executor.ask_host("noted"))[2:]
        assert [value for value in noted if value != "next turn"] == list(range(FRAMES_A_TURN + 10))
        assert FRAMES_A_TURN // 2 < noted.index("next turn") < FRAMES_A_TURN

    serve(TALKING, test)


def test_news_come_in_order_among_answers_and_again_and_again(serve: Callable[..., None]) -> None:
    async def test(executor: hosted.HostedExecutor, heard: Heard) -> None:
        await executor.ask_host("start")
        for turn in range(3):
            executor.tell_host("say", [turn, "a"])
            await executor.ask_host("say", [turn, "b" * 100_000])  # in shared memory
            assert heard[4 * turn :] == [turn, "a", turn, "b" * 100_000]

    serve(TALKING, test)


def test_who_listens_hears_that_the_host_could_not_follow_or_is_gone(serve: Callable[..., None]) -> None:
    async def test(executor: hosted.HostedExecutor, heard: Heard) -> None:
        await executor.ask_host("start")
        executor.tell_host("say", 5)
        await until(lambda: heard)
        assert isinstance(heard[0], TypeError | RemoteWorkerError)
        executor.tell_host("no_such_method")
        await until(lambda: len(heard) == 2)
        assert "no method 'no_such_method'" in str(heard[1])
        assert await executor.ask_host("noted") == []  # it goes on
        os.kill(executor._link.pid, signal.SIGKILL)
        await until(lambda: len(heard) == 3)
        assert isinstance(heard[2], WorkerDiedError)
        late = Heard()
        executor.listen(late.take, Any)
        assert isinstance(late[0], WorkerDiedError)
        executor.tell_host("note", 1)  # nobody hears it, nothing is raised

    serve(TALKING, test)


def test_a_host_that_does_not_read_is_sent_no_more_than_a_few_files_and_says_when_it_reads_again(
    serve: Callable[..., None],
) -> None:
    async def test(executor: hosted.HostedExecutor, _heard: Heard) -> None:
        await executor.ask_host("start")
        looks: list[bool] = []
        executor.when_room(lambda: looks.append(executor.has_room))
        assert executor.has_room
        before = len(fds())
        os.kill(executor._link.pid, signal.SIGSTOP)
        sent = 0
        while executor.has_room:
            executor.tell_host("keep", "x" * 100_000)  # in shared memory
            sent += 1
        assert sent > 1
        assert len(fds()) == before + 1  # what the socket has is not ours any more
        assert looks == []
        os.kill(executor._link.pid, signal.SIGCONT)
        await until(lambda: looks)
        assert looks == [True]
        assert len(fds()) == before
        assert await executor.ask_host("kept") == sent

    serve(TALKING, test)


def test_what_has_no_form_is_not_told(serve: Callable[..., None]) -> None:
    async def test(executor: hosted.HostedExecutor, _heard: Heard) -> None:
        await executor.ask_host("start")
        for unsendable in (object(), 10**30, "half a pair \ud800"):
            with pytest.raises(ArgumentError, match="between processes"):
                executor.tell_host("note", unsendable)
        assert await executor.ask_host("noted") == []

    serve(TALKING, test)


def test_a_shutdown_after_the_loop_reads_ends_it_in_order(serve: Callable[..., None]) -> None:
    async def test(executor: hosted.HostedExecutor, heard: Heard) -> None:
        await executor.ask_host("start")
        executor.shutdown()
        await until(lambda: executor.ended, 1.5)  # before anybody insists
        assert isinstance(heard[0], EngineClosedError)

    serve(TALKING, test)


def test_a_start_that_hangs_is_answered_for_in_time_and_can_be_ended(serve: Callable[..., None]) -> None:
    async def test(executor: hosted.HostedExecutor, heard: Heard) -> None:
        (answer,) = await asyncio.wait_for(executor.call("load", timeout_s=0.5), 5)
        assert isinstance(answer.error, DeadlineError)
        assert "did not answer 'load' within" in str(answer.error)
        executor.shutdown()
        await until(lambda: executor.ended, 5)
        assert isinstance(heard[0], EngineClosedError)

    serve(HANGING, test)


def test_a_host_that_can_not_end_all_its_processes_ends_all_the_same_and_says_why(serve: Callable[..., None]) -> None:
    async def test(executor: hosted.HostedExecutor, heard: Heard) -> None:
        await executor.ask_host("start")
        holder = await executor.ask_host("hold")
        try:
            await executor.ask_host("fall")
            await until(lambda: heard, 8)
            assert isinstance(heard[0], WorkerDiedError)
            assert "rank 0 (pid 1) ended" in str(heard[0].log_lines)
        finally:
            os.kill(holder, signal.SIGKILL)

    serve(HELD, test)


def test_an_engine_that_takes_no_news_gets_a_few_and_later_the_rest_at_once(serve: Callable[..., None]) -> None:
    async def test(executor: hosted.HostedExecutor, heard: Heard) -> None:
        await executor.ask_host("start")
        executor.tell_host("submit", request("long", 100))
        executor.tell_host("submit", request("short", 10))
        await until(lambda: len(heard) == NEWS_AHEAD)
        executor.tell_host("submit", request("later", 100))
        await ended(executor)
        assert len(heard) == NEWS_AHEAD
        executor.tell_host("taken", 1)
        await until(lambda: len(heard) > NEWS_AHEAD)
        await executor.ask_host("abort", [])
        assert len(heard) == NEWS_AHEAD + 1
        for name, tokens in (("long", 100), ("short", 10), ("later", 100)):
            mine = [one for news in heard for one in news if one.request_id == name]
            assert [token for one in mine for token in one.token_ids] == list(range(tokens))
            assert "".join(one.text for one in mine) == "".join(f"{number} " for number in range(tokens))
            assert [one.finish_reason for one in mine][-1] == "length"
            assert all(one.finish_reason is None for one in mine[:-1])

    serve(BARE, test, list[TextOutput])


def test_news_that_wait_come_before_the_answer_to_a_freeze_and_none_of_what_was_aborted(
    serve: Callable[..., None],
) -> None:
    async def test(executor: hosted.HostedExecutor, heard: Heard) -> None:
        await executor.ask_host("start")
        executor.tell_host("submit", request("kept", 60))
        executor.tell_host("submit", request("aborted", 20_000))
        await until(lambda: len(heard) == NEWS_AHEAD)
        await ended(executor, but=1)
        await executor.ask_host("abort", ["aborted"])
        assert len(heard) == NEWS_AHEAD
        await executor.ask_host("freeze")
        assert len(heard) == NEWS_AHEAD + 1
        assert [one.request_id for one in heard[-1]] == ["kept"]
        kept = [one for news in heard for one in news if one.request_id == "kept"]
        assert [token for one in kept for token in one.token_ids] == list(range(60))
        executor.tell_host("submit", request("aborted", 3))
        executor.tell_host("taken", NEWS_AHEAD)
        await until(lambda: any(one.finish_reason for news in heard[NEWS_AHEAD + 1 :] for one in news))
        again = [one for news in heard[NEWS_AHEAD + 1 :] for one in news]
        assert [token for one in again for token in one.token_ids] == [0, 1, 2]

    serve(BARE, test, list[TextOutput])


def test_a_prompt_of_text_comes_back_as_ids_and_one_of_ids_does_not(serve: Callable[..., None]) -> None:
    async def test(executor: hosted.HostedExecutor, heard: Heard) -> None:
        await executor.ask_host("start")
        executor.tell_host("submit", request("ids", 1))
        executor.tell_host("submit", request("text", 1, prompt="x"))
        await until(lambda: sum(map(len, heard)) == 2)
        found = {one.request_id: one for news in heard for one in news}
        assert (found["ids"].prompt_token_ids, found["ids"].cached_tokens) == (None, 0)
        assert (found["text"].prompt_token_ids, found["text"].cached_tokens) == ((1,), 0)

    serve(BARE, test, list[TextOutput])


@pytest.mark.parametrize("order", ["prepare_sleep", "remove_lora", "thaw"])
def test_what_vllm_could_not_clear_is_not_left_to_answer_from(serve: Callable[..., None], order: str) -> None:
    async def ask(executor: hosted.HostedExecutor) -> None:
        if order == "thaw":
            await executor.ask_host("thaw", True)
        else:
            await executor.ask_host("order", order, packed((1,)), None)

    async def test(executor: hosted.HostedExecutor, _heard: Heard) -> None:
        await executor.ask_host("start")
        await ask(executor)
        executor.tell_host("clears", False)
        with pytest.raises(OmniError, match="could not clear its prefix cache"):
            await ask(executor)
        executor.tell_host("clears", True)
        await ask(executor)

    serve(FORGETFUL, test, list[TextOutput])


def test_vllms_own_wake_up_and_resume_are_refused_while_the_host_holds_it_still(serve: Callable[..., None]) -> None:
    async def test(executor: hosted.HostedExecutor, _heard: Heard) -> None:
        await executor.ask_host("start")
        await executor.ask_host("own", "resume_generation")
        await executor.ask_host("freeze")
        for name in ("wake_up", "resume_generation"):
            with pytest.raises(UnsupportedError, match=rf"vLLM's own {name}\(\) was called under stage 7"):
                await executor.ask_host("own", name)
        await executor.ask_host("thaw", False)
        await executor.ask_host("own", "resume_generation")

    serve(FORGETFUL, test, list[TextOutput])


def test_a_host_loads_no_torch_before_the_environment_is_set_that_torch_reads() -> None:
    module = hosted.HOST.partition(":")[0]
    code = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_torchvision_that_does_not_fit_is_named_with_the_cure():
    printed = ["Traceback (most recent call last):", "RuntimeError: operator torchvision::nms does not exist"]
    said = hosted._root_cause(RuntimeError("Engine core initialization failed. See root cause above."), printed, FIRST)
    assert "operator torchvision::nms does not exist; the torchvision" in said
    assert said.endswith("pip uninstall -y torchvision torchaudio torchcodec. Nothing is left of it")


def test_another_cause_is_told_as_it_is():
    said = hosted._root_cause(RuntimeError("no room"), [], FIRST)
    assert said == "stage 0: vLLM could not start: no room. Nothing is left of it"
