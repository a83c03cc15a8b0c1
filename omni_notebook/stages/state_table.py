"""What each order does in each state of a stage; a pure function over one table (DESIGN §5), tested cell by cell."""

from __future__ import annotations

from enum import StrEnum

from omni_notebook.errors import AsleepError, NeedsWeightsError, OmniError, StageFailedError
from omni_notebook.protocol import MemoryState


class Order(StrEnum):
    """The orders that the table knows."""

    SLEEP_1 = "sleep(1)"
    SLEEP_2 = "sleep(2)"
    WAKE = "wake"
    WAKE_NO_RELOAD = "wake(reload=False)"
    GENERATE = "generate"
    LOAD_WEIGHTS = "load_weights"
    LORA = "a change of LoRA adapters"
    RESTART = "restart"


class Action(StrEnum):
    """What an order comes to."""

    RUN = "run"
    NOOP = "no-op"
    DROP_BACKUP = "drop backup"
    HOLD = "hold"
    REFUSE = "refuse"


class Column(StrEnum):
    """The states at rest, as the table's columns."""

    AWAKE = "AWAKE"
    ASLEEP_1 = "ASLEEP (level 1)"
    ASLEEP_2 = "ASLEEP (level 2)"
    PARTLY_AWAKE = "PARTLY_AWAKE"
    NEEDS_WEIGHTS = "NEEDS_WEIGHTS"
    FAILED = "FAILED"


_RUN, _NOOP, _DROP, _HOLD, _REFUSE = Action.RUN, Action.NOOP, Action.DROP_BACKUP, Action.HOLD, Action.REFUSE
TABLE: dict[Order, tuple[Action, Action, Action, Action, Action, Action]] = {
    #                       AWAKE  ASLEEP 1  ASLEEP 2  PARTLY   NEEDS_WEIGHTS FAILED
    Order.SLEEP_1:         (_RUN,  _NOOP,    _REFUSE,  _RUN,    _REFUSE,      _REFUSE),
    Order.SLEEP_2:         (_RUN,  _DROP,    _NOOP,    _RUN,    _RUN,         _REFUSE),
    Order.WAKE:            (_NOOP, _RUN,     _RUN,     _RUN,    _RUN,         _REFUSE),
    Order.WAKE_NO_RELOAD:  (_NOOP, _RUN,     _RUN,     _RUN,    _NOOP,        _REFUSE),
    Order.GENERATE:        (_RUN,  _HOLD,    _HOLD,    _HOLD,   _REFUSE,      _REFUSE),
    Order.LOAD_WEIGHTS:    (_RUN,  _REFUSE,  _REFUSE,  _REFUSE, _RUN,         _REFUSE),
    Order.LORA:            (_RUN,  _REFUSE,  _REFUSE,  _REFUSE, _REFUSE,      _REFUSE),
    Order.RESTART:         (_RUN,  _RUN,     _RUN,     _RUN,    _RUN,         _RUN),
}  # fmt: skip


def column(state: MemoryState, level: int | None) -> Column:
    """The table's column for a state at rest."""
    if state == MemoryState.ASLEEP:
        return Column.ASLEEP_2 if level == 2 else Column.ASLEEP_1
    return Column(state)


def decide(order: Order, state: MemoryState, level: int | None) -> Action:
    """What `order` does to a stage at rest in `state`."""
    return TABLE[order][list(Column).index(column(state, level))]


def refusal(
    order: Order,
    stage_id: int,
    state: MemoryState,
    level: int | None,
    *,
    reload: bool = True,
    way_out: str | None = None,
) -> OmniError:
    """Why the table refuses `order`, the state now, and the call that helps.

    Args:
        order: what was asked for.
        stage_id: the stage.
        state: where its memory is.
        level: how deep it sleeps.
        reload: a path has the weights.
        way_out: what leads out of FAILED where `restart` does not.
    """
    at = column(state, level)
    head = f"stage {stage_id} is {at}"
    if at == Column.FAILED:
        helps = way_out or f"call restart({stage_id})"
        return StageFailedError(f"{head}: {order} is refused; {helps}. Nothing changed")
    if at == Column.NEEDS_WEIGHTS:
        return NeedsWeightsError(
            f"{head}: its memory holds no valid weights, {order} is refused; call load_weights({stage_id}, path)"
            f"{f' or wake_up([{stage_id}]) to reload' if reload else ''}. Nothing changed"
        )
    if order == Order.SLEEP_1:
        return AsleepError(
            f"{head}: its weights are gone, level 1 has nothing to back up; call wake_up([{stage_id}]) first. "
            "Nothing changed"
        )
    return AsleepError(f"{head}: {order} is refused; call wake_up([{stage_id}]) first. Nothing changed")
