# ruff: noqa: EM101, EM102
"""The entry point: the calls and bookkeeping of 0.30 that a caller can see, and lies that it can be told to tell.

`lies` holds words; each is looked for where it would be told.
"""

import asyncio
import contextlib
import sys
import time
import uuid
from types import SimpleNamespace

from vllm_omni.diffusion.data import OmniACK
from vllm_omni.engine import process
from vllm_omni.inputs.data import OmniDiffusionSamplingParams, SamplingParams
from vllm_omni.outputs import CompletionOutput, OmniRequestOutput

MIB = 1 << 20
GIB = 1 << 30


class EngineDeadError(Exception):
    pass


class AsyncOmni:
    def __init__(self, model: str = "", *args, **kwargs):
        if model == "broken":
            self.first = process.start("StageEngineCoreProc_stage0", MIB, 1)
            raise RuntimeError("no such architecture")
        if model == "wordless":  # what 0.24 does on a machine whose platform it does not have
            raise NotImplementedError
        written = sys.stdout.write
        sys.stdout.write = lambda text: written(
            f"(DiffusionWorker pid=1) {text}"
        )  # as 0.30, for a stage in this process
        self.model = model
        self.options = kwargs
        self.lies: set[str] = set()
        self.calls: list[tuple] = []
        self.token_s = 0.0
        n_bytes = int(kwargs.get("fake_bytes", 24 * MIB))
        tp = int(kwargs.get("tensor_parallel_size", 1))
        thinker = process.start("StageEngineCoreProc_stage0_replica0", n_bytes, 1)
        painter = process.start("StageDiffusionProc", n_bytes, 2, children=tp)
        self.roots = [thinker, painter]
        clients = [
            SimpleNamespace(resources=SimpleNamespace(engine_manager=SimpleNamespace(processes=[thinker]))),
            SimpleNamespace(_proc_manager=SimpleNamespace(proc=painter)),
        ]
        facts = [
            SimpleNamespace(model_stage="thinker", final_output=True, final_output_type="text", stage_type="llm"),
            SimpleNamespace(model_stage="dit", final_output=True, final_output_type="image", stage_type="diffusion"),
        ]
        self.engine = SimpleNamespace(
            stage_configs=[SimpleNamespace(stage_type="llm"), SimpleNamespace(stage_type="diffusion")],
            stage_pools=[SimpleNamespace(clients=[client]) for client in clients],
            get_stage_metadata=facts.__getitem__,
        )
        self.default_sampling_params_list = [SamplingParams(), OmniDiffusionSamplingParams()]
        self.final_output_task = None
        self.errored = False
        self._pause_cond = asyncio.Condition()
        self._paused = False
        self._hold = False
        self._paused_stage_ids: set[int] = set()
        self._asleep: set[int] = set()
        self._level2 = False
        self._requests: dict[str, asyncio.Event] = {}
        self._adapters: dict[int, set[int]] = {0: set(), 1: set()}

    async def _lie(self, word):
        """Whether to tell it; "hang:…" and "raise:…" are carried out here."""
        if f"hang:{word}" in self.lies:
            await asyncio.Event().wait()
        if f"raise:{word}" in self.lies:
            raise RuntimeError(f"{word} went wrong inside")
        return word in self.lies

    async def _tell(self, stage_id, order):
        return await asyncio.to_thread(process.ask, self.roots[stage_id], order)

    # ------------------------------------------------------------------------------ requests

    async def generate(
        self,
        prompt,
        sampling_params=None,
        request_id="",
        *,
        prompt_text=None,
        lora_request=None,
        tokenization_kwargs=None,
        sampling_params_list=None,
        output_modalities=None,
        trace_headers=None,
        priority=0,
        data_parallel_rank=None,
        session_id=None,
        reasoning_ended=None,
        reasoning_parser_kwargs=None,
        arrival_time=None,
    ):
        async with self._pause_cond:
            await self._pause_cond.wait_for(lambda: not self._paused)
        if self._asleep:
            raise RuntimeError("Generation rejected: Engine is partially or fully asleep.")
        self.calls.append(("generate", sampling_params_list, lora_request))
        aborted = self._requests[request_id] = asyncio.Event()
        try:
            async for output in self._outputs(prompt, request_id, sampling_params_list, output_modalities, aborted):
                yield output
        finally:
            del self._requests[request_id]

    async def _outputs(self, prompt, request_id, params, modalities, aborted):
        await self._lie("generate")
        ar, diffusion = params
        weights = await self._tell(0, "checksum")
        ids: list[int] = []
        for number in range(ar.max_tokens):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(aborted.wait(), self.token_s)
            if aborted.is_set():
                yield self._text(request_id, ids, "abort", finished=True)
                return
            ids.append(hash((weights, str(prompt), ar.seed, number)) % 1000)
            yield self._text(request_id, list(ids), None, finished=False)
        if "silent" in self.lies:
            return
        if "given up" in self.lies:
            yield self._text(request_id, ids, "error", finished=True)
            return
        yield self._text(request_id, ids, "length", finished=True)
        if modalities == ["text"]:
            return
        if "stage_error" in self.lies:
            yield OmniRequestOutput(request_id=request_id, stage_id=1, error="CUDA out of memory")
            return
        from PIL import Image

        shade = (await self._tell(1, "checksum"))[0] + (diffusion.seed or 0)
        picture = Image.new("RGB", (diffusion.width or 8, diffusion.height or 8), (shade % 256, shade // 256 % 256, 7))
        yield OmniRequestOutput(request_id=request_id, stage_id=1, final_output_type="image", images=[picture])

    @staticmethod
    def _text(request_id, ids, reason, *, finished):
        made = [CompletionOutput(0, " ".join(map(str, ids)), ids, reason)]
        return OmniRequestOutput(request_id=request_id, stage_id=0, outputs=made, finished=finished)

    async def abort(self, request_id, *, timeout=None):
        await self._lie("abort")
        for one in [request_id] if isinstance(request_id, str) else request_id:
            if one in self._requests:
                self._requests[one].set()

    # --------------------------------------------------------------------------- sleep and wake

    async def sleep(self, stage_ids=None, level=2, mode="abort"):
        self.calls.append(("sleep", stage_ids, level, mode))
        async with self._pause_cond:
            self._paused = True
        acks = []
        for stage_id in stage_ids if stage_ids is not None else (0, 1):
            acks += await (self._sleep_ar if stage_id == 0 else self._sleep_diffusion)(stage_id)
            self._asleep.add(stage_id)
        self._level2 |= level == 2
        return [] if "mute" in self.lies else acks

    async def _sleep_ar(self, stage_id):
        self._hold = True
        if not await self._lie("sleep"):
            await self._tell(stage_id, "sleep")
        return [OmniACK(f"engine_core-sleep-{uuid.uuid4().hex[:8]}", "SUCCESS", stage_id, 0, metadata={"level": 1})]

    async def _sleep_diffusion(self, stage_id):
        task_id = str(uuid.uuid4())
        if "swallowed" in self.lies:
            return [{"supported": False, "error": "worker 1 is out of host memory"}]
        if "error_ack" in self.lies:
            return [OmniACK(task_id, "ERROR", error_msg="cumem failed")]
        if await self._lie("sleep"):
            claims = await self._tell(stage_id, "usage")
        else:
            claims = await self._tell(stage_id, "sleep")
        if None in claims:
            return []
        claim = sum(claims) * (3 if "inflated" in self.lies else 1)
        words = {"source": "Platform_Fake_Device", "total_freed_gib": f"{claim / GIB:.2f}", "rank_residual_gib": "9.99"}
        return [OmniACK(task_id, "SUCCESS", stage_id, 0, claim, words)]

    async def wake_up(self, stage_ids=None, tags=None):
        self.calls.append(("wake_up", stage_ids))
        if self._level2:
            raise NotImplementedError("wake_up() after sleep(level=2) is not yet implemented")
        acks = []
        for stage_id in [one for one in (stage_ids if stage_ids is not None else (0, 1)) if one in self._asleep]:
            if not await self._lie("wake"):
                await self._tell(stage_id, "wake")
            acks.append(OmniACK(str(uuid.uuid4()), "SUCCESS", stage_id, 0, metadata={"state": "WARM"}))
            self._asleep.discard(stage_id)
        if not self._hold:
            await self._open()
        return acks

    async def is_sleeping(self):
        return bool(self._asleep)

    # --------------------------------------------------------------------------- pause and resume

    async def pause_generation(
        self, *, mode="abort", wait_for_inflight_requests=False, clear_cache=True, stage_ids=None
    ):
        self.calls.append(("pause_generation", mode, stage_ids))
        async with self._pause_cond:
            self._paused = self._hold = True
        chosen = set(stage_ids if stage_ids is not None else (0, 1))
        closing = chosen if mode == "keep" else chosen - {1}
        self._paused_stage_ids |= closing
        if "step_level" in self.lies and 1 in closing:
            error = {"supported": False, "error": "NotImplementedError: request-level execution only"}
            raise RuntimeError(f"pause_scheduler failed: {error}")
        await self._lie("pause")

    async def resume_generation(self, stage_ids=None):
        self.calls.append(("resume_generation", stage_ids))
        await self._lie("resume")
        self._paused_stage_ids -= set(stage_ids if stage_ids is not None else (0, 1))
        if not self._paused_stage_ids:
            self._hold = False
            await self._open()

    async def _open(self):
        async with self._pause_cond:
            self._paused = False
            self._pause_cond.notify_all()

    async def is_paused(self):
        return self._paused

    # ------------------------------------------------------------------------------- adapters

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None, stage_ids=None):
        self.calls.append((method, args, stage_ids))
        results = []
        for stage_id in stage_ids if stage_ids is not None else (0, 1):
            if f"lora:{stage_id}" in self.lies and method == "add_lora":
                results.append({"supported": False, "error": "rank 64 is above max_lora_rank 16"})
            elif f"lora_rank:{stage_id}" in self.lies and method == "add_lora":
                results.append([self._adapter(stage_id, method, args[0]), {"error": "out of slots"}])
            elif f"no_remove:{stage_id}" in self.lies and method == "remove_lora":
                results.append({"supported": False, "error": "the rank is busy"})
            elif f"todo:{stage_id}" in self.lies:
                results.append({"supported": False, "todo": True})
            else:
                results.append([self._adapter(stage_id, method, args[0])])
        return results

    def _adapter(self, stage_id, method, argument):
        there = self._adapters[stage_id]
        if method == "add_lora":
            there.add(argument.lora_int_id)
            return True
        found = argument in there
        if method == "remove_lora":
            there.discard(argument)
        return found

    async def add_lora(self, lora_request):
        return all(bool(one) for one in await self.collective_rpc("add_lora", args=(lora_request,)))

    async def remove_lora(self, adapter_id):
        return all(bool(one) for one in await self.collective_rpc("remove_lora", args=(adapter_id,)))

    async def pin_lora(self, adapter_id):
        return all(bool(one) for one in await self.collective_rpc("pin_lora", args=(adapter_id,)))

    async def list_loras(self):
        return sorted(set().union(*self._adapters.values()))

    # ---------------------------------------------------------------------------------- the end

    async def check_health(self):
        await self._lie("health")
        if any(root.poll() is not None for root in self.roots):
            raise EngineDeadError("Stage has no live replica")

    def shutdown(self, timeout=None):
        if "hang:shutdown" in self.lies:
            time.sleep(600)
        if "shutdown" in self.lies:
            raise RuntimeError("shutdown went wrong inside")
        for root in self.roots:
            root.stdin.close()
            root.wait(5)
            root.stdout.close()
