"""A press: the order goes straight to the engine's loop, from whatever thread the kernel calls; the card tells."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

from omni_notebook import units
from omni_notebook.notebook.dashboard import orders
from omni_notebook.notebook.dashboard.drawing import Note
from omni_notebook.notebook.results import AckList
from omni_notebook.protocol import OmniACK
from omni_notebook.verbs import hints
from omni_notebook.verbs.session import session

if TYPE_CHECKING:
    from concurrent.futures import Future

    from omni_notebook.notebook.dashboard.orders import Press
    from omni_notebook.notebook.dashboard.sampler import Sampler
    from omni_notebook.protocol import StageStatus


def carry_out(sampler: Sampler, stage_id: int, press: Press) -> None:
    """Give the order of a pressed button; returns at once and raises nothing."""
    engine = sampler.engine
    if engine is None:
        _note(sampler, stage_id, f"✗ {press}: {orders.CLOSED}", wrong=True)
        return
    try:
        stage = next(stage for stage in engine.status().stages if stage.stage_id == stage_id)
        line, began_s = orders.line(press, stage), time.perf_counter()
        _note(sampler, stage_id, f"{press}: ordered (%omni {line})")
        future = engine.submit(orders.call(press, engine, stage))
    except Exception as error:  # noqa: BLE001  (a page's message has nobody to raise to)
        _note(sampler, stage_id, f"✗ {press}: {_words(error)}", wrong=True)
        return
    future.add_done_callback(functools.partial(_ended, sampler, stage, press, (line, began_s)))


def _ended(sampler: Sampler, stage: StageStatus, press: Press, given: tuple[str, float], future: Future[Any]) -> None:
    """On the engine's thread: what became of an order that was `given` as a line at a time."""
    line, began_s = given
    if future.cancelled():
        _note(sampler, stage.stage_id, f"✗ {press}: called off, the engine is shutting down", wrong=True)
        return
    error = future.exception()
    if error is not None:
        session().note_error(error, line)
        _note(sampler, stage.stage_id, f"✗ {press}: {_words(error)}", wrong=True)
    else:
        said = _restarted(sampler, stage, began_s) if press == orders.Press.RESTART else _result(future.result())
        _note(sampler, stage.stage_id, f"✓ {press}{said}")
    acks = getattr(error, "acks", None) if error is not None else future.result()
    if isinstance(acks, list) and session().running is sampler.engine:
        session().acks = AckList(acks, "wake" if press == orders.Press.WAKE else "sleep")


def _note(sampler: Sampler, stage_id: int, text: str, *, wrong: bool = False) -> None:
    clock = time.strftime("%H:%M:%S")
    sampler.notes[stage_id] = Note(f"{text} · {clock}", wrong=wrong)


def _words(error: BaseException) -> str:
    """One line, in verbs."""
    return " ".join(hints.in_verbs(str(error) or type(error).__name__).split())


def _restarted(sampler: Sampler, stage: StageStatus, began_s: float) -> str:
    took = units.milliseconds(1000 * (time.perf_counter() - began_s))
    engine = sampler.engine
    now = [] if engine is None else hints.pick(engine.status(), [stage.stage_id])
    loaded = sum(tag.resident_bytes for one in now for rank in one.ranks for tag in rank.tags.values())
    return f": new workers, {units.size(loaded)} loaded in {took}"


def _result(result: object) -> str:
    if not isinstance(result, list) or not all(isinstance(ack, OmniACK) for ack in result) or not result:
        return ": done"
    if all(ack.metadata.get("noop") for ack in result):
        return ": nothing to do, it was so already"
    ranks = f"{len(result)} rank{'s' if len(result) > 1 else ''}"
    freed = sum(ack.freed_bytes for ack in result)
    mapped = sum(ack.metadata.get("mapped_bytes") or 0 for ack in result)
    slowest = max((ack.metadata.get("latency_ms") or 0.0 for ack in result), default=0.0)
    moved = f"mapped {units.size(mapped)}" if mapped and not freed else f"freed {units.size(freed)}"
    return f": {ranks} {moved} in {units.milliseconds(slowest)}"
