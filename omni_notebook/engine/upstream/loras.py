"""LoRA adapters over upstream's control calls, whose answers are read: its own methods count an error as True."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_notebook.engine.upstream.package import lora_request
from omni_notebook.engine.upstream.refusing import busy, is_kept, refuse_state
from omni_notebook.errors import ArgumentError, LoRAError, OmniError, StageBusyError, UnsupportedError
from omni_notebook.paths import expanded
from omni_notebook.protocol import LoRAStatus
from omni_notebook.stages.state_table import Order
from omni_notebook.stages.waiting import Deadline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.engine.upstream.core import UpCore
    from omni_notebook.engine.upstream.stage import UpStage
    from omni_notebook.protocol import LoRARequest
    from omni_notebook.stages.waiting import CancelToken

UNDO_S = 30.0
"""Seconds for a stage to let go of an adapter that another one could not take."""


class Loras:
    """Adds, removes and pins; every method belongs to the engine's loop."""

    def __init__(self, core: UpCore) -> None:
        self._core = core

    def known(self) -> list[int]:
        """The ids of all adapters, sorted."""
        return sorted({number for stage in self._core.stages for number in stage.loras})

    async def add(
        self, request: LoRARequest, stages: Sequence[UpStage], deadline: Deadline, token: CancelToken
    ) -> bool:
        """Put an adapter on the stages that can take one; whether it was not there yet.

        Raises:
            ArgumentError: another adapter has this name or number.
            UnsupportedError: none of the stages takes adapters.
            StageBusyError, PauseError, AsleepError, StageFailedError: refused, nothing changed.
            LoRAError: one could not take it; it was taken off all.
        """
        async with self._core.hold(deadline, token):
            if self._is_there(request, stages):
                return False
            self._check(stages)
            path = str(expanded(request.lora_path).resolve())
            theirs = lora_request(request.lora_name, request.lora_int_id, path)
            taken: list[UpStage] = []
            for stage in stages:
                try:
                    if await self._ask(stage, "add_lora", theirs, deadline):
                        taken.append(stage)
                except OmniError as error:
                    now = await self._taken_off([*taken, stage], request.lora_int_id)
                    msg = f"adapter {request.title} was not added: {error}; {now}"
                    raise LoRAError(msg) from error
            if not taken:
                msg = f"no stage of this vllm_omni engine takes LoRA adapters; {request.title} was not added"
                raise UnsupportedError(msg)
            status = LoRAStatus(
                lora_name=request.lora_name,
                lora_int_id=request.lora_int_id,
                lora_path=path,
                rank=_rank(path),
                pinned=False,
            )
            for stage in taken:
                stage.loras[request.lora_int_id] = status
            return True

    async def remove(self, number: int, deadline: Deadline, token: CancelToken) -> bool:
        """Take an adapter off every stage; whether it was there.

        Raises:
            StageBusyError: requests are on a stage that has it, or name it; likewise refused as by `add`.
            LoRAError: a stage did not let go of it.
        """
        async with self._core.hold(deadline, token):
            having = [stage for stage in self._core.stages if number in stage.loras]
            self._check(having)
            self._check_unnamed(having, number)
            for stage in having:
                await self._ask(stage, "remove_lora", number, deadline)
                del stage.loras[number]
            return bool(having)

    async def pin(self, number: int, deadline: Deadline, token: CancelToken) -> bool:
        """Keep an adapter in its slot; True.

        Raises:
            ArgumentError: there is no such adapter.
            LoRAError: a stage can not; likewise refused as by `add`.
        """
        async with self._core.hold(deadline, token):
            having = [stage for stage in self._core.stages if number in stage.loras]
            if not having:
                msg = f"there is no LoRA adapter {number}; there are: {self.known() or 'none'}. Nothing changed"
                raise ArgumentError(msg)
            self._check(having)
            for stage in having:
                await self._ask(stage, "pin_lora", number, deadline)
                one = stage.loras[number]
                stage.loras[number] = LoRAStatus(
                    lora_name=one.lora_name,
                    lora_int_id=number,
                    lora_path=one.lora_path,
                    rank=one.rank,
                    pinned=True,
                )
            return True

    def _check(self, stages: Sequence[UpStage]) -> None:
        refuse_state(Order.LORA, stages)
        for stage in stages:
            in_transit = self._core.requests.in_transit(stage.stage_id)
            if in_transit and not is_kept(stage):
                raise busy(Order.LORA, stage, in_transit)

    def _check_unnamed(self, stages: Sequence[UpStage], number: int) -> None:
        """Refuse to take away what a request that is here still needs, also where a pause holds it."""
        named_by = self._core.requests.naming(number)
        for stage in stages if named_by else ():
            title = f"{stage.loras[number].lora_name!r} (id {number})"
            msg = f"adapter {title} is named by requests that are here ({', '.join(named_by)}). Nothing changed"
            raise StageBusyError(msg, stage_id=stage.stage_id, running=0, queued=0, in_transit=len(named_by))

    def _is_there(self, request: LoRARequest, stages: Sequence[UpStage]) -> bool:
        for one in (one for stage in self._core.stages for one in stage.loras.values()):
            same = (one.lora_int_id == request.lora_int_id, one.lora_name == request.lora_name)
            if any(same) and not all(same):
                msg = f"{one.lora_name!r} (id {one.lora_int_id}) is there already; {request.title} was not added"
                raise ArgumentError(msg)
        return all(request.lora_int_id in stage.loras for stage in stages)

    async def _ask(
        self, stage: UpStage, method: str, argument: Any, deadline: Deadline, *, or_false: bool = False
    ) -> bool:
        """Whether a stage's ranks all did it; False: the stage has no such call.

        Raises:
            LoRAError: one answered an error, or, without `or_false`, False.
        """
        left_s = deadline.left_s()
        call = self._core.upstream.collective_rpc(
            method=method, timeout=left_s, args=(argument,), stage_ids=[stage.stage_id]
        )
        results = await self._core.calls.run(call, deadline, method)
        if results and all(isinstance(one, dict) and one.get("todo") for one in results):
            return False
        wrong = [one for one in _flat(results) if one is not True and not (or_false and one is False)]
        if wrong or not results:
            first = wrong[0] if wrong else "nothing: no rank answered"
            words = first.get("error", first) if isinstance(first, dict) else first
            msg = f"{method} of stage {stage.stage_id} was answered with {words}"
            raise LoRAError(msg)
        return True

    async def _taken_off(self, stages: Sequence[UpStage], number: int) -> str:
        """Take it off the stages that may have it, on some rank; where it is then."""
        left = []
        for stage in stages:
            try:
                await self._ask(stage, "remove_lora", number, Deadline(UNDO_S), or_false=True)
            except OmniError as error:
                left.append(f"it may still be on stage {stage.stage_id}: {error}")
        return "; ".join(left) or "it is on no stage"


def _flat(results: Sequence[Any]) -> list[Any]:
    return [one for result in results for one in (result if isinstance(result, list | tuple) else [result])]


def _rank(path: str) -> int:
    """The rank that an adapter's own file states; 0 where it states none."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return int(json.loads((Path(path) / "adapter_config.json").read_text(encoding="utf-8")).get("r") or 0)
    return 0
