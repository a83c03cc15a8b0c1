"""The dashboard: CPU of a frame, memory over ten thousand of them, and what an open one costs generation."""

from __future__ import annotations

import asyncio
import gc
import statistics
import sys
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import psutil

from benchmarks import Figure
from omni_notebook.memory.host import rss_bytes
from omni_notebook.notebook.dashboard.drawing import Drawer, View
from omni_notebook.notebook.dashboard.log import Log
from omni_notebook.notebook.dashboard.sampler import add_status
from omni_notebook.notebook.dashboard.series import Timeline
from omni_notebook.protocol import (
    MIB,
    AckEvent,
    AckMetadata,
    EngineStatus,
    MemoryState,
    OmniACK,
    PauseState,
    RankStatus,
    StageStatus,
    TagMemory,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from omni_notebook.engine.async_omni import AsyncOmni

FRAME_MS, COST = 50.0, 0.01
FRAMES, GROWN_MIB = 10_000, 8.0
PAIRS, IMAGES, STEPS = 40, 6, 40
STUDENT_T = 2.02
"""For 39 degrees of freedom, 95 %."""
TAGS = ("weights", "kv_cache", "ballast")


def _status(n_ranks: int, shares: NDArray[np.float64]) -> EngineStatus:
    """Two stages; `shares` [rank] is how much of each rank's memory is there."""
    ranks = [
        RankStatus(
            rank=number,
            replica=0,
            pid=1000 + number,
            device="cpu",
            alive=True,
            tags={tag: TagMemory(400 * MIB, int(400 * MIB * shares[number])) for tag in TAGS},
            host_backup_bytes=400 * MIB,
            process_bytes=900 * MIB,
        )
        for number in range(n_ranks)
    ]
    half = n_ranks // 2
    stages = tuple(_stage(number, tuple(own)) for number, own in enumerate((ranks[:half], ranks[half:])))
    return EngineStatus(model="demo", closed=False, paused=False, uptime_s=1.0, stages=stages)


def _stage(number: int, ranks: tuple[RankStatus, ...]) -> StageStatus:
    return StageStatus(
        stage_id=number,
        name="simulated",
        kind="ar",
        runtime="torch",
        model="demo",
        state=MemoryState.AWAKE,
        level=None,
        awake_tags=TAGS,
        pause_state=PauseState.OPEN,
        pause_mode=None,
        weight_version="v1",
        recoverable=True,
        running=1,
        queued=0,
        in_transit=0,
        waiting_at_gate=0,
        ballast_bytes=0,
        ranks=ranks,
        last_error=None,
    )


def _ack(task: int, rank: int) -> AckEvent:
    facts = AckMetadata(source="simulated", state="COLD", level=1, pid=1000 + rank, residual_bytes=MIB).to_dict()
    ack = OmniACK(task_id=f"t{task}", status="SUCCESS", stage_id=0, rank=rank, freed_bytes=MIB, metadata=facts)
    return AckEvent(time.time(), "sleep", ack)


class _Frames:
    """Frames of an engine in which every rank's memory changes with every sample: the worst case."""

    def __init__(self, n_ranks: int) -> None:
        self._n_ranks = n_ranks
        self._random = np.random.default_rng(0)
        self._timeline, self._log, self._drawer = Timeline(), Log(), Drawer()
        self._at_s = 0.0
        self._task = 0

    def sample(self) -> EngineStatus:
        """One sample more, and now and then an order."""
        self._at_s += 0.2
        status = _status(self._n_ranks, self._random.random(self._n_ranks))
        add_status(self._timeline, self._at_s, status)
        if int(self._at_s * 5) % 50 == 0:
            self._task += 1
            for rank in range(self._n_ranks // 2):
                self._log.take(_ack(self._task, rank), self._at_s)
        return status

    def draw(self, status: EngineStatus) -> int:
        """One frame; how many characters."""
        frame = self._drawer.draw(View(status, self._timeline.window(), self._log, (), {}, "", self._at_s))
        return len(frame.chart) + len(frame.log) + len(frame.reclaimed) + len(frame.host)


def _frame(n_ranks: int) -> Figure:
    frames = _Frames(n_ranks)
    for _ in range(600):
        status = frames.sample()
    took, sizes = [], []
    for _ in range(40):
        status = frames.sample()
        began = time.process_time()
        sizes.append(frames.draw(status))
        took.append(1e3 * (time.process_time() - began))
    worst = statistics.quantiles(took, n=20)[-1]
    return Figure(
        what=f"one frame, {n_ranks} ranks, p95",
        value=worst,
        unit="ms of CPU",
        bar=f"≤ {FRAME_MS:g} ms" if n_ranks == 256 else "",
        met=worst <= FRAME_MS if n_ranks == 256 else None,
        note=f"median {statistics.median(took):.1f} ms, {statistics.mean(sizes) / 1024:.0f} KiB; all ranks change",
    )


def _memory() -> Figure:
    """What the process holds after ten thousand frames, above what it held when every ring was full."""
    frames = _Frames(256)
    settled = 0
    for number in range(FRAMES):
        frames.draw(frames.sample())
        if number == FRAMES // 4:
            gc.collect()
            settled = rss_bytes()
    gc.collect()
    grown = rss_bytes() - settled
    return Figure(
        what=f"memory grown over {FRAMES} frames, 256 ranks",
        value=grown / MIB,
        unit="MiB",
        floor=settled / MIB,
        floor_is="held once full",
        bar=f"≤ {GROWN_MIB:g} MiB",
        met=grown <= GROWN_MIB * MIB,
        note="resident memory of the process; a frame is 0.15 MiB",
    )


class _Rate(NamedTuple):
    """What generation did: images a second, and CPU seconds an image, of the kernel and its ranks."""

    images_per_s: float
    cpu_s: float


def _draw_images(engine: AsyncOmni) -> _Rate:
    async def draw() -> None:
        for seed in range(IMAGES):
            async for _ in engine.generate("a red star", sampling_params={"num_inference_steps": STEPS, "seed": seed}):
                pass

    before, began = _all_cpu_s(), time.perf_counter()
    engine.submit(draw()).result()
    return _Rate(IMAGES / (time.perf_counter() - began), (_all_cpu_s() - before) / IMAGES)


def _costs(executor: str) -> Iterator[Figure]:
    """Generation with a dashboard open against without, in turns: by the clock, and by the CPU that an image takes."""
    from omni_notebook import AsyncOmni, dashboard  # noqa: PLC0415  (torch)

    pairs: list[tuple[_Rate, _Rate]] = []
    with AsyncOmni("demo", executor=executor) as engine:
        asyncio.run(engine.check_health())
        _draw_images(engine)
        for pair in range(PAIRS):
            rates = {}
            for watched in (True, False) if pair % 2 else (False, True):
                shown = dashboard(engine) if watched else None
                rates[watched] = _draw_images(engine)
                if shown is not None:
                    shown.close()
            pairs.append((rates[True], rates[False]))
    what = f"generation with a dashboard open, executor {executor}"
    bare = statistics.median(without.images_per_s for _, without in pairs)
    slower = [1 - seen.images_per_s / without.images_per_s for seen, without in pairs]
    yield _loss(f"{what}, images/s", slower, "slower", bare, "images/s without, not %")
    bare = statistics.median(without.cpu_s for _, without in pairs)
    dearer = [seen.cpu_s / without.cpu_s - 1 for seen, without in pairs]
    yield _loss(f"{what}, CPU an image", dearer, "more", bare, "CPU s an image without, not %")


def _loss(what: str, losses: list[float], word: str, floor: float, floor_is: str) -> Figure:
    mean = statistics.mean(losses)
    half = STUDENT_T * statistics.stdev(losses) / len(losses) ** 0.5
    return Figure(
        what=what,
        value=1e2 * mean,
        unit=f"% {word}",
        floor=floor,
        floor_is=floor_is,
        bar=f"≤ {COST:.0%}",
        met=True if mean + half <= COST else False if mean - half > COST else None,
        note=f"± {1e2 * half:.1f} % (95 %), {len(losses)} pairs",
    )


def _share(executor: str) -> Figure:
    """The sampler's thread against all CPU that generation takes: resolved also where others use the machine."""
    from omni_notebook import AsyncOmni, dashboard  # noqa: PLC0415  (torch)

    with AsyncOmni("demo", executor=executor) as engine:
        _draw_images(engine)
        shown = dashboard(engine)
        thread = next(thread for thread in threading.enumerate() if thread.name == "omni-dashboard").native_id
        before = _cpu_s(thread)
        for _ in range(PAIRS // 2):
            _draw_images(engine)
        own, all_of_it = (now - then for now, then in zip(_cpu_s(thread), before, strict=True))
        shown.close()
    return Figure(
        what=f"CPU of an open dashboard's thread, executor {executor}",
        value=1e2 * own / all_of_it,
        unit="% of all",
        bar=f"≤ {COST:.0%}",
        met=own <= COST * all_of_it,
        note=f"{own:.2f} s of {all_of_it:.1f} s, kernel and ranks",
    )


def _cpu_s(thread: int | None) -> tuple[float, float]:
    """CPU seconds of one thread, and of this process with its children."""
    here = psutil.Process()
    own = next(one.user_time + one.system_time for one in here.threads() if one.id == thread)
    return own, _all_cpu_s()


def _all_cpu_s() -> float:
    here = psutil.Process()
    times = [one.cpu_times() for one in (here, *here.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def measure() -> Iterator[Figure]:
    """All of them; takes some minutes."""
    for n_ranks in (2, 16, 256, 1024):
        yield _frame(n_ranks)
    yield _memory()
    for executor in ("uni", "mp"):
        yield _share(executor)
        yield from _costs(executor)


if __name__ == "__main__":
    for figure in measure():
        sys.stdout.write(f"{figure}\n")
