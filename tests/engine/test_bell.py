"""A bell wakes who waits at it: no ring is lost, none costs anything while nobody waits, every wait ends."""

from __future__ import annotations

import asyncio
import threading
import time
from math import inf
from typing import TYPE_CHECKING, Any

import pytest

from omni_notebook.engine.loop import Bell, Chime
from omni_notebook.stages.waiting import Deadline

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


@pytest.mark.quiet
def test_a_ring_on_another_thread_wakes_at_once() -> None:
    bell, found = Bell(), []

    async def wait() -> float:
        threading.Timer(0.03, lambda: (found.append(time.perf_counter()), bell.ring())).start()
        assert await bell.until(lambda: bool(found), lambda: inf)
        return time.perf_counter() - found[0]

    assert asyncio.run(wait()) < 0.05  # well below the tick, which would find it too


@pytest.mark.quiet
def test_a_ring_between_the_look_and_the_place_in_line_is_not_lost() -> None:
    bell, looks = Bell(), []

    def look() -> bool:
        looks.append(len(looks))
        if len(looks) == 1:
            bell.ring()
        return len(looks) > 1

    began_s = time.perf_counter()
    assert asyncio.run(bell.until(look, lambda: inf))
    assert time.perf_counter() - began_s < 0.05


def test_a_wait_ends_at_its_deadline_and_when_nobody_rings_for_what_is_there() -> None:
    bell = Bell()
    assert not asyncio.run(bell.until(lambda: False, Deadline(0.15).left_s))
    begun = time.monotonic()
    assert asyncio.run(bell.until(lambda: time.monotonic() - begun > 0.05, Deadline(5).left_s))


@pytest.mark.quiet
def test_what_is_begun_is_begun_once_and_can_ring_at_once() -> None:
    bell, begun, looks = Bell(), [], []

    def begin() -> None:
        begun.append(len(looks))
        bell.ring()

    began_s = time.perf_counter()
    assert asyncio.run(bell.until(lambda: looks.append(1) is None and len(looks) > 3, Deadline(5).left_s, begin))
    assert begun == [2]  # after the look with a place in line
    assert time.perf_counter() - began_s < 0.05  # its ring was heard


def test_rings_at_a_loop_that_has_ended_harm_nobody() -> None:
    bell = Bell()

    async def leave() -> None:
        task = asyncio.create_task(bell.until(lambda: False, lambda: inf))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(leave())
    bell.ring()
    bell.ring()
    assert asyncio.run(bell.until(lambda: True, lambda: inf))


def test_a_thousand_things_from_four_threads_are_all_seen() -> None:
    bell, made = Bell(), []

    def make() -> None:
        for number in range(250):
            made.append(number)
            bell.ring()

    async def read() -> int:
        threads = [threading.Thread(target=make) for _ in range(4)]
        for thread in threads:
            thread.start()
        seen = 0
        async with asyncio.timeout(20):
            while seen < 1000:
                await bell.until(lambda: len(made) > seen, lambda: inf)  # noqa: B023  (awaited at once)
                seen = len(made)
        for thread in threads:
            thread.join()
        return seen

    assert asyncio.run(read()) == 1000


class Turns(asyncio.SelectorEventLoop):
    """Counts how often another thread wakes it."""

    woken = 0

    def call_soon_threadsafe(self, *args: Any, **known: Any) -> asyncio.Handle:
        self.woken += 1
        return super().call_soon_threadsafe(*args, **known)


@pytest.mark.quiet
def test_bells_of_one_turn_wake_each_waiting_loop_once_and_whoever_waits_there() -> None:
    bells, rung, loops = [Bell() for _ in range(20)], [], [Turns(), Turns()]

    async def wait(bell: Bell) -> None:
        assert await bell.until(lambda: bool(rung), lambda: inf)
        assert time.perf_counter() - rung[0] < 0.05  # well below the tick

    async def wait_all(place: int) -> None:
        await asyncio.gather(*map(wait, bells[place::2]))

    async def ring() -> None:
        chime = Chime()
        chime.ring(Bell())  # nobody waits at this one
        rung.append(time.perf_counter())
        for bell in bells:
            chime.ring(bell)
            chime.ring(bell)

    threads = [
        threading.Thread(target=loop.run_until_complete, args=(wait_all(place),)) for place, loop in enumerate(loops)
    ]
    for thread in threads:
        thread.start()
    while not all(bell._waiter for bell in bells):
        time.sleep(0.001)
    asyncio.run(ring_and_turn(ring))
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert [loop.woken for loop in loops] == [1, 1]
    for loop in loops:
        loop.close()


async def ring_and_turn(ring: Callable[[], Awaitable[None]]) -> None:
    await ring()
    await asyncio.sleep(0)


@pytest.mark.quiet
def test_a_chime_at_a_loop_that_has_ended_still_rings_at_the_others() -> None:
    gone, here, chime = Bell(), Bell(), Chime()

    async def leave() -> None:
        asyncio.create_task(gone.until(lambda: False, lambda: inf))  # noqa: RUF006  (it ends with the loop)
        await asyncio.sleep(0)
        gone._waiter_kept = gone._waiter  # type: ignore[attr-defined]

    asyncio.run(leave())
    gone._waiter = gone._waiter_kept  # type: ignore[attr-defined]

    async def main() -> float:
        chime.ring(gone)
        chime.ring(here)
        began_s = time.perf_counter()
        looks: list[int] = []
        assert await here.until(lambda: looks.append(1) is None and len(looks) > 2, lambda: inf)
        return time.perf_counter() - began_s

    assert asyncio.run(main()) < 0.05
