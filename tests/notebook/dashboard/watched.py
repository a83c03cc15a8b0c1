"""Engines for tests of what watches them: any number of ranks, events on demand, no memory and no processes."""

from omni_notebook.engine.events import EventHub
from omni_notebook.engine.loop import EngineLoop
from omni_notebook.errors import StageBusyError
from omni_notebook.notebook.dashboard.drawing import Drawer, View
from omni_notebook.notebook.dashboard.log import Log
from omni_notebook.notebook.dashboard.sampler import add_status
from omni_notebook.notebook.dashboard.series import Timeline
from omni_notebook.protocol import MIB, AckEvent, MemoryState, TagMemory
from tests.notebook.acks import ack, rank, stage, status

TAGS = {"weights": 900 * MIB, "kv_cache": 400 * MIB, "ballast": 256 * MIB}


def ranks(n, share=1.0, **facts):
    """`n` ranks in processes of their own; `share` (a number, or a function of the rank) is resident."""
    return tuple(
        rank(
            rank=number,
            pid=1000 + number,
            tags={
                tag: TagMemory(size, int(size * (share(number) if callable(share) else share)))
                for tag, size in TAGS.items()
            },
            **facts,
        )
        for number in range(n)
    )


def two_stages(n, share=1.0, **facts):
    """A status of `n` ranks in two stages (all in the second where `n` is odd)."""
    first = stage(0, name="thinker", ranks=ranks(n // 2, share))
    return status(first, stage(1, name="painter", kind="diffusion", ranks=ranks(n - n // 2, share)), **facts)


class Samples:
    """A timeline, a log and the statuses that filled them; draws frames as a sampler does."""

    def __init__(self):
        self.timeline, self.log, self.drawer = Timeline(), Log(), Drawer()
        self.at_s = 0.0
        self.notes, self.devices = {}, ()

    def sample(self, state, times=1, step_s=0.2):
        for _ in range(times):
            self.at_s += step_s
            add_status(self.timeline, self.at_s, state)
        self.status = state
        return self

    def order(self, acks, order="sleep", task_id="t"):
        for one in acks:
            one.task_id = task_id
            self.log.take(AckEvent(1_000_000.0 + self.at_s, order, one), self.at_s)
        return self

    def view(self, trouble=""):
        return View(self.status, self.timeline.window(), self.log, self.devices, self.notes, trouble, self.at_s)

    def frame(self, trouble=""):
        return self.drawer.draw(self.view(trouble))


def slept(n, share=0.0):
    """Two stages of `n` ranks, the first put to sleep half way."""
    made = Samples().sample(two_stages(n), 50)
    made.order(
        [ack(0, number, freed_bytes=1556 * MIB, pid=1000 + number, residual_bytes=30 * MIB) for number in range(n // 2)]
    )
    asleep = stage(0, name="thinker", state=MemoryState.ASLEEP, level=2, ranks=ranks(n // 2, share))
    return made.sample(status(asleep, stage(1, name="painter", kind="diffusion", ranks=ranks(n - n // 2))), 50)


class FakeEngine:
    """Answers the calls that a dashboard makes; `current` is the status it gives."""

    url = host = None

    def __init__(self, current):
        self.current = current
        self.hub = EventHub()
        self.calls = []
        self.error = None
        self._loop = EngineLoop("fake-engine")

    def status(self):
        if isinstance(self.current, Exception):
            raise self.current
        return self.current

    def subscribe(self):
        return self.hub.subscribe()

    def submit(self, coroutine):
        return self._loop.submit(coroutine)

    async def _answer(self, *call):
        self.calls.append(call)
        if self.error is not None:
            raise self.error
        return []

    def sleep(self, stages, level, mode, *, discard):
        return self._answer("sleep", stages, level, mode, discard)

    def wake_up(self, stages):
        return self._answer("wake", stages)

    def restart(self, stage_id):
        return self._answer("restart", stage_id)

    def pause_generation(self, mode, stages):
        return self._answer("pause", mode, stages)

    def resume_generation(self, stages):
        return self._answer("resume", stages)

    def close(self):
        self.hub.close()
        self._loop.stop(5)


def busy_error():
    return StageBusyError(
        "stage 0 is busy: call sleep(..., mode='keep' | 'wait' | 'abort')",
        stage_id=0,
        running=1,
        queued=0,
        in_transit=0,
    )
