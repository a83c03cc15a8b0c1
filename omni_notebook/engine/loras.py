"""Adapters over all stages of an engine: adding, removing, pinning, and which one a request names.

Everything here belongs to the engine's loop, but for the reading of files.
"""

from __future__ import annotations

import asyncio
import operator
from typing import TYPE_CHECKING, Any

from omni_notebook.engine.orders import busy
from omni_notebook.errors import ArgumentError, ConfigError, DeadlineError, LoRAError, StageBusyError
from omni_notebook.paths import expanded
from omni_notebook.protocol import LoRARequest
from omni_notebook.stages import lora_orders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from omni_notebook.engine.flow import Flow
    from omni_notebook.engine.orders import Orders
    from omni_notebook.models.lora import Adapter
    from omni_notebook.stages.stage import Stage
    from omni_notebook.stages.transitions import Context
    from omni_notebook.stages.waiting import Deadline


class Loras:
    """The adapters of an engine's stages; `flows` gives the requests that are on their way."""

    def __init__(self, stages: Sequence[Stage], orders: Orders, flows: Callable[[], Iterable[Flow]]) -> None:
        self._stages = stages
        self._orders = orders
        self._flows = flows

    def known(self) -> dict[int, LoRARequest]:
        """Every adapter by its id, in order."""
        found = {one.request.lora_int_id: one.request for stage in self._stages for one in stage.loras}
        return dict(sorted(found.items()))

    # -------------------------------------------------------------------------------------- orders

    async def add(self, request: LoRARequest, named: Sequence[Stage] | None, deadline: Deadline) -> bool:
        """See `AsyncOmni.add_lora`."""
        self._check_new(request)
        reading = asyncio.to_thread(_look, request, self._stages if named is None else named, strict=named is not None)
        try:
            adapter, stages = await asyncio.wait_for(reading, deadline.left_s())
        except TimeoutError:
            msg = f"{request.lora_path} was not read within {deadline.seconds:g} s; nothing changed"
            raise DeadlineError(msg) from None

        def check() -> list[Stage]:
            self._check_new(request)
            return _without(stages, request, adapter.digest)

        added: list[Stage] = []

        async def change(context: Context) -> None:
            added.extend(check())  # another call may have added it before this one had the locks
            if added:
                await lora_orders.add(added, request, adapter.digest, context)

        if todo := check():
            await self._orders.lora(todo, check, change, deadline)
        return bool(added)

    async def remove(self, lora_id: int, deadline: Deadline) -> bool:
        """See `AsyncOmni.remove_lora`."""
        removed: list[Stage] = []

        async def change(context: Context) -> None:
            removed.extend(self._having(lora_id))  # another call may have removed it before this one had the locks
            if removed:
                await lora_orders.remove(removed, lora_id, context)

        if stages := self._having(lora_id):
            await self._orders.lora(stages, lambda: self._check_unnamed(lora_id), change, deadline)
        return bool(removed)

    async def pin(self, lora_id: int, deadline: Deadline) -> bool:
        """See `AsyncOmni.pin_lora`."""
        stages = self._check_there(lora_id)
        await self._orders.lora(
            stages,
            lambda: self._check_slots(self._check_there(lora_id), lora_id),
            lambda context: lora_orders.pin(stages, lora_id, context),
            deadline,
        )
        return True

    def _having(self, lora_id: int) -> list[Stage]:
        return [stage for stage in self._stages if lora_id in stage.loras]

    def _check_there(self, lora_id: int) -> list[Stage]:
        """The stages that have an adapter.

        Raises:
            ArgumentError: none has.
        """
        stages = self._having(lora_id)
        if not stages:
            raise ArgumentError(self._unknown(lora_id, "Nothing changed"))
        return stages

    def _check_new(self, request: LoRARequest) -> None:
        """Refuse an id or a name that another adapter has.

        Raises:
            ArgumentError: it is taken.
        """
        for other in self.known().values():
            same = (other.lora_int_id == request.lora_int_id, other.lora_name == request.lora_name)
            if any(same) and other != request:
                taken = f"lora_int_id {request.lora_int_id}" if same[0] else f"lora_name {request.lora_name!r}"
                msg = (
                    f"{taken} belongs to adapter {other.title} from {other.lora_path}; call "
                    f"remove_lora({other.lora_int_id}) first, or take another. Nothing changed"
                )
                raise ArgumentError(msg)

    def _check_unnamed(self, lora_id: int) -> None:
        """Refuse to take away what a request that is here still needs.

        Raises:
            StageBusyError: names the request.
        """
        for stage in self._having(lora_id):
            needed_by = [flow.request_id for flow in self._flows() if flow.uses(stage, lora_id)]
            if needed_by:
                title = self.known()[lora_id].title
                raise _busy(stage, f"adapter {title} is named by requests that are here ({', '.join(needed_by)})")

    def _check_slots(self, stages: Sequence[Stage], lora_id: int) -> None:
        """Refuse a pin that finds no slot, or leaves too few for the requests that are here.

        Raises:
            LoRAError: every slot holds a pinned adapter.
            StageBusyError: requests that are here name adapters which would not fit into the rest.
        """
        for stage in stages:
            pinned = stage.loras.pinned | {lora_id}
            left = stage.loras.slots - len(pinned)
            if left < 0:
                names = ", ".join(one.request.title for one in stage.loras if one.pinned)
                msg = (
                    f"pinned adapters hold all {stage.loras.slots} slots of stage {stage.stage_id} ({names}); remove "
                    f"one, or start with max_loras={stage.loras.slots + 1}. Nothing changed"
                )
                raise LoRAError(msg)
            moving = {flow.lora_id(stage) for flow in self._flows()} - {0} - pinned
            if len(moving) > left:
                names = ", ".join(map(str, sorted(moving)))
                raise _busy(stage, f"requests that are here name adapters {names}, for which {left} slots are left")

    def lost(self, stage: Stage, request: LoRARequest, error: LoRAError) -> None:
        """End the requests that name an adapter which a restart of their stage could not bring back."""
        for flow in list(self._flows()):
            if flow.uses(stage, request.lora_int_id):
                flow.fail(error)

    # ------------------------------------------------------------------------------------ requests

    def resolve(self, asked: Any, route: Sequence[Stage]) -> tuple[LoRARequest | None, frozenset[int]]:
        """The adapter that a request names, and the stages of its route that apply it.

        Raises:
            ArgumentError: there is no such adapter, or not on this route; nothing was started.
            LoRAError: pinned adapters hold every slot of a stage.
        """
        if asked is None:
            return None, frozenset()
        request = self._find(asked)
        lora_id = request.lora_int_id
        applying = [stage for stage in route if lora_id in stage.loras]
        if not applying:
            there = ", ".join(str(stage.stage_id) for stage in self._having(lora_id))
            msg = f"adapter {request.title} is on stage {there}, which this request does not reach. Nothing was started"
            raise ArgumentError(msg)
        for stage in applying:
            if not stage.loras.may_start(lora_id, ()):
                msg = (
                    f"adapter {request.title} finds no slot: pinned ones hold all {stage.loras.slots} of stage "
                    f"{stage.stage_id}; call remove_lora(id) for one of them. Nothing was started"
                )
                raise LoRAError(msg)
        return request, frozenset(stage.stage_id for stage in applying)

    def _find(self, asked: Any) -> LoRARequest:
        """The adapter with this name or id, or this very one.

        Raises:
            ArgumentError: there is none; names those that there are.
        """
        known = self.known()
        if isinstance(asked, str):
            found = next((one for one in known.values() if one.lora_name == asked), None)
        elif _is_number(asked):
            found = known.get(operator.index(asked))
        else:
            request = lora_request_from(asked)
            found = known.get(request.lora_int_id)
            found = found if found == request else None
        if found is None:
            raise ArgumentError(self._unknown(asked, "Nothing was started"))
        return found

    def _unknown(self, asked: Any, outcome: str) -> str:
        names = ", ".join(one.title for one in self.known().values()) or "none; call add_lora(request)"
        return f"there is no adapter {asked!r}; adapters are: {names}. {outcome}"


def lora_request_from(value: Any) -> LoRARequest:
    """A request with an absolute path from one of ours, or anything with its three fields (vLLM's).

    Raises:
        ArgumentError: a field is missing or wrong.
    """
    try:
        name, lora_id, path = value.lora_name, value.lora_int_id, value.lora_path
    except AttributeError:
        msg = f"{value!r} is no LoRARequest(lora_name, lora_int_id, lora_path); nothing changed"
        raise ArgumentError(msg) from None
    checked = LoRARequest(name, lora_id, path)
    return LoRARequest(name, lora_id, str(expanded(checked.lora_path).resolve()))


def check_lora_id(lora_id: Any) -> int:
    """An adapter's id.

    Raises:
        ArgumentError: not a whole number.
    """
    if not _is_number(lora_id):
        msg = f"lora_int_id={lora_id!r} is not a whole number; nothing changed"
        raise ArgumentError(msg)
    return operator.index(lora_id)


def _is_number(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _look(request: LoRARequest, stages: Sequence[Stage], *, strict: bool) -> tuple[Adapter, list[Stage]]:
    """Read an adapter, and the stages that it fits; `strict`: it must fit all of them.

    Raises:
        ConfigError: it is broken, or does not fit; names the first layer.
    """
    from omni_notebook.models.lora import check_rank, misfit  # noqa: PLC0415  (torch: loaded when used)
    from omni_notebook.models.pipeline_lora import read_any_adapter  # noqa: PLC0415

    adapter = read_any_adapter(request.lora_path)
    why = {one.stage_id: one.model.unadaptable or misfit(adapter, one.model.adaptable) for one in stages}
    fitting = [stage for stage in stages if why[stage.stage_id] is None]
    if not fitting or (strict and len(fitting) < len(stages)):
        unfit = [stage for stage in stages if stage not in fitting]
        said = "; ".join(f"stage {s.stage_id} ({s.config.title}): {why[s.stage_id]}" for s in unfit)
        msg = f"{request.lora_path} does not fit: {said}. Nothing changed"
        raise ConfigError(msg)
    for stage in fitting:
        check_rank(adapter, stage.config.max_lora_rank)
    return adapter, fitting


def _without(stages: Sequence[Stage], request: LoRARequest, digest: str) -> list[Stage]:
    """The stages that do not have an adapter, whose files have this digest.

    Raises:
        ArgumentError: one has it from other files.
    """
    lora_id = request.lora_int_id
    for stage in stages:
        if lora_id in stage.loras and stage.loras[lora_id].digest != digest:
            msg = (
                f"adapter {request.title} was added with other files than {request.lora_path} holds now; call "
                f"remove_lora({lora_id}) first. Nothing changed"
            )
            raise ArgumentError(msg)
    return [stage for stage in stages if lora_id not in stage.loras]


def _busy(stage: Stage, why: str) -> StageBusyError:
    msg = (
        f"stage {stage.stage_id}: {why}; the order is refused, nothing changed. Let them end, or call abort(request_id)"
    )
    return busy(stage, msg)
