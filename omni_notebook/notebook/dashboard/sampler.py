"""One thread an engine: samples it five times a second, hears every event, and hands each frame to whoever shows it.

The thread is the only one that sets what dashboards show. It ends with the last of them, or with the engine; then
nothing here refers to the engine any more.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from omni_notebook.errors import OmniError
from omni_notebook.notebook.dashboard import parts
from omni_notebook.notebook.dashboard.devices import DeviceProbe
from omni_notebook.notebook.dashboard.drawing import Drawer, Note, View
from omni_notebook.notebook.dashboard.log import Log
from omni_notebook.notebook.dashboard.series import Clock, Key, Timeline
from omni_notebook.protocol import AckEvent, LinkEvent, StateEvent

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_notebook.notebook.dashboard.devices import Device
    from omni_notebook.notebook.dashboard.drawing import Frame
    from omni_notebook.protocol import EngineStatus, Event
    from omni_notebook.verbs.engine_api import Engine

DEVICES_S = 1.0
JOIN_S = 1.2
FRESH_S = 0.7
"""So long a dashboard that is closed waits for its last frame: a status there may not answer."""
SHUTDOWN_S = 30.0
"""So long a closed engine is watched while it gives its memory back."""


class Sampler:
    """Samples of one engine, and the frames drawn from them."""

    def __init__(self, engine: Engine) -> None:
        self.engine: Engine | None = engine
        self.notes: dict[int, Note] = {}
        """What became of the last press, by stage; set from any thread."""
        self._listeners: list[Callable[[Frame], None]] = []
        self._lock = threading.RLock()  # a listener may close itself
        self._events: deque[tuple[Event, float]] = deque()
        self._timeline, self._log, self._drawer, self._probe = Timeline(), Log(), Drawer(), DeviceProbe()
        self._devices: tuple[Device, ...] = ()
        self._devices_s = float("-inf")
        self._status = engine.status()
        self._trouble = self._blind = ""
        self._ended, self._heard_all = threading.Event(), threading.Event()
        self._closed_s: float | None = None
        self._begun = self._shown = 0
        self._told = threading.Condition()
        self._subscription = engine.subscribe()
        self._listen(engine)
        self.frame = self._sample(engine)
        self._thread = threading.Thread(target=self._main, name="omni-dashboard", daemon=True)
        self._thread.start()

    def _listen(self, engine: Engine) -> None:
        """Hear events on the engine's own loop; it only appends, so it holds nothing up."""
        subscription, take = self._subscription, self._take

        async def hear() -> None:
            async for event in subscription:
                take(event)

        try:
            engine.submit(hear()).add_done_callback(lambda _future: self._heard_all.set())
        except OmniError:  # closed: there are no more events
            self._heard_all.set()

    def _take(self, event: Event) -> None:
        if isinstance(event, AckEvent | StateEvent | LinkEvent):  # memory and requests come with the next status
            self._events.append((event, time.monotonic()))

    # --------------------------------------------------------------------------------- listeners

    def attach(self, listener: Callable[[Frame], None]) -> None:
        """Give every frame from now on to `listener`, on the sampler's thread."""
        self._listeners.append(listener)

    def detach(self, listener: Callable[[Frame], None]) -> None:
        """Give it no more frames. Once back, the listener is not called again."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)

    @property
    def unheard(self) -> bool:
        """Whether nobody listens."""
        return not self._listeners

    @property
    def running(self) -> bool:
        """Whether frames still come."""
        return not self._ended.is_set()

    def fresh(self) -> None:
        """Return when a frame that was begun after now is shown, none comes any more, or `FRESH_S` have passed."""
        if self._thread is threading.current_thread():
            return
        with self._told:
            wanted = self._begun + 1
            self._told.wait_for(lambda: self._shown >= wanted or not self.running, FRESH_S)

    def end(self) -> None:
        """Make no more frames; does not wait."""
        self._ended.set()

    def join(self) -> None:
        """Wait until the thread has ended and let go of the engine."""
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    # ---------------------------------------------------------------------------------- the thread

    def _main(self) -> None:
        clock = Clock()
        try:
            while not self._ended.wait(clock.wait_s()):
                clock.tick()
                engine = self.engine
                if engine is None or not self._turn(engine):
                    break
                del engine
        finally:
            self._let_go()

    def _turn(self, engine: Engine) -> bool:
        """One sample, shown to everyone; whether there will be another."""
        last = self._is_last()
        with self._told:
            self._begun += 1
        self.frame = frame = self._frame(engine, last=last)
        self._blind = ""
        with self._lock:
            for listener in list(self._listeners):
                if self._ended.is_set():
                    return False
                if listener in self._listeners:  # one before it may have closed it
                    self._show(listener, frame)
        with self._told:
            self._shown = self._begun
            self._told.notify_all()
        return not last

    def _frame(self, engine: Engine, *, last: bool) -> Frame:
        """The next frame; where there is none, the one before with the reason: a thread that ends shows nothing."""
        try:
            return self._sample(engine, last=last)
        except Exception as error:  # noqa: BLE001  (whatever it is, the next sample may be sound)
            why = f"no frame since then: {type(error).__name__}: {error}"
            return replace(self.frame, last=last, head=parts.head(self._status, why))

    def _is_last(self) -> bool:
        """Whether the engine has told everything; asked before the sample, which then shows all of it."""
        if not self._status.closed:
            return False
        now_s = time.monotonic()
        self._closed_s = now_s if self._closed_s is None else self._closed_s
        return self._heard_all.is_set() or now_s - self._closed_s > SHUTDOWN_S

    def _show(self, listener: Callable[[Frame], None], frame: Frame) -> None:
        try:
            listener(frame)
        except Exception as error:  # noqa: BLE001  (one dashboard's trouble must not blind the others)
            self._blind = f"a dashboard could not show a frame: {type(error).__name__}: {error}"

    def _let_go(self) -> None:
        self._ended.set()
        with self._told:
            self._told.notify_all()
        self._subscription.close()
        self._probe.close()
        self.engine = None
        forget(self)

    def _sample(self, engine: Engine, *, last: bool = False) -> Frame:
        now_s, was_closed = time.monotonic(), self._status.closed
        try:
            self._status = engine.status()
            self._trouble = ""
        except Exception as error:  # noqa: BLE001  (the last status stays on the screen, with what went wrong)
            self._trouble = f"no status since then: {type(error).__name__}: {error}"
        else:
            add_status(self._timeline, now_s, self._status)
            if self._status.closed and not was_closed:
                self.notes.clear()  # they told of an engine that is no more
        if now_s - self._devices_s >= DEVICES_S:
            self._devices, self._devices_s = self._probe.look(self._status, engine.host), now_s
        while self._events:
            self._log.take(*self._events.popleft())
        trouble = "; ".join(filter(None, (self._trouble, self._blind)))
        notes = dict(self.notes)
        view = View(self._status, self._timeline.window(), self._log, self._devices, notes, trouble, now_s)
        return self._drawer.draw(view, last=last)


def add_status(timeline: Timeline, time_s: float, status: EngineStatus) -> None:
    """What of each tag is resident, as one sample: unknown of a dead worker, 0 once the engine has ended."""
    keys: list[Key] = []
    values: list[int | None] = []
    for stage in status.stages:
        for rank in stage.ranks:
            for tag, memory in rank.tags.items():
                keys.append(Key(stage.stage_id, rank.replica, rank.rank, tag))
                gone = 0 if status.closed else None
                values.append(memory.resident_bytes if rank.alive else gone)
    if status.closed and status.left_at is None:  # what a connection left behind is where it was, unseen
        given_back = [key for key in timeline.keys if key not in set(keys)]
        keys, values = keys + given_back, values + [0] * len(given_back)
    timeline.add(time_s, tuple(keys), values)


# ------------------------------------------------------------------------------------ one an engine

_SAMPLERS: dict[int, Sampler] = {}
_LATEST: list[Sampler] = []
"""The sampler that was started last; once ended it holds samples and no engine."""
_LOCK = threading.Lock()


def latest_frame() -> Frame | None:
    """The newest frame of the sampler that was started last, whether or not it still runs."""
    with _LOCK:
        return _LATEST[-1].frame if _LATEST else None


def attach(engine: Engine, listener: Callable[[Frame], None]) -> Sampler:
    """The engine's sampler, started if none runs; `listener` gets its frames."""
    with _LOCK:
        sampler = _running(engine)
        if sampler is None:
            sampler = _SAMPLERS[id(engine)] = Sampler(engine)
            _LATEST[:] = [sampler]
        sampler.attach(listener)
    return sampler


def detach(sampler: Sampler, listener: Callable[[Frame], None]) -> None:
    """Take a listener away; the last one ends the sampler."""
    sampler.detach(listener)  # not under the lock: it waits for listeners, and one may wait for the lock
    with _LOCK:
        last = sampler.unheard
        if last:
            sampler.end()
    if last:
        sampler.join()


def forget(sampler: Sampler) -> None:
    """It has ended."""
    with _LOCK:
        for key in [key for key, known in _SAMPLERS.items() if known is sampler]:
            del _SAMPLERS[key]


def _running(engine: Engine) -> Sampler | None:
    sampler = _SAMPLERS.get(id(engine))
    return sampler if sampler is not None and sampler.running and sampler.engine is engine else None
