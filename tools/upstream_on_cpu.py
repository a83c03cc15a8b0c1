"""Runs an installed vLLM-Omni 0.30 behind `UpstreamOmni` on a CPU, to see what the real package does with our orders.

python tools/upstream_on_cpu.py write FOLDER     a Stable Diffusion 3 of 20 MB with random weights (needs diffusers)
python tools/upstream_on_cpu.py run FOLDER       start, draw, pause, resume, sleep, wake, draw, end; a line for each

vLLM-Omni has no platform for a CPU; this file is one, which the second form puts where its plugins are found. There is
no allocator for a sleep on a CPU either: here it has one that moves nothing, so that its answers can be held against
what is seen. Its models want `torchvision`, whose operators need not work.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

HERE = Path(__file__).resolve()
_ENTRY = "[vllm_omni.platform_plugins]\ncpu = upstream_on_cpu:plugin\n"
_OPERATORS = """
import torch
library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
for name in ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d"):
    for ending in (name, "_" + name + "_backward"):
        library.define(ending + "(Tensor input) -> Tensor")
"""
"""What a torchvision that was built for another torch looks for; no model here calls it."""


def plugin() -> str:
    """Where vLLM-Omni finds the platform's class."""
    return "upstream_on_cpu.CpuPlatform"


class NoAllocator:
    """Moves nothing."""

    pointer_to_data: dict[int, Any] = {}  # noqa: RUF012  (what the real one has)

    @classmethod
    def get_instance(cls) -> NoAllocator:
        """The one."""
        return cls()

    @contextlib.contextmanager
    def use_memory_pool(self, *_args: Any, **_known: Any) -> Iterator[None]:
        """Memory as it is."""
        yield

    def sleep(self, *_args: Any, **_known: Any) -> None:
        """Nothing."""

    def get_current_usage(self) -> int:
        """Bytes of its own."""
        return 0

    wake_up = release_pools = _python_malloc_callback = _python_free_callback = sleep


def _platform() -> type:
    """The platform's class, made where vLLM-Omni is imported."""
    import psutil  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from vllm.device_allocator import cumem  # noqa: PLC0415
    from vllm.platforms.cpu import CpuPlatform as Base  # noqa: PLC0415
    from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum  # noqa: PLC0415

    cumem.CuMemAllocator, cumem.cumem_available = NoAllocator, True

    def memory(*_args: Any) -> tuple[int, int]:
        now = psutil.virtual_memory()
        return now.available, now.total

    def attention(_cls: Any, *_args: Any, **_known: Any) -> str:
        from vllm_omni.diffusion.attention.backends import abstract  # noqa: PLC0415
        from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum  # noqa: PLC0415

        abstract.AttentionImpl.forward = lambda self, *args, **known: self.forward_cuda(*args, **known)
        return str(DiffusionAttentionBackendEnum.TORCH_SDPA.get_path())

    def resident(*_args: Any) -> int:
        return int(psutil.Process().memory_info().rss)

    answers: dict[str, Any] = {
        "get_omni_ar_worker_cls": "vllm_omni.worker.gpu_ar_worker.GPUARWorker",
        "get_omni_generation_worker_cls": "vllm_omni.worker.gpu_generation_worker.GPUGenerationWorker",
        "get_default_stage_config_path": "vllm_omni/model_executor/stage_configs",
        "supports_torch_inductor": False,
        "get_device_count": 8,
        "get_device_version": None,
        "synchronize": None,
        "get_device_name": "cpu",
        "reset_peak_memory_stats": None,
        "empty_cache": None,
    }
    members: dict[str, Any] = {name: _always(value) for name, value in answers.items()}
    members |= {name: classmethod(resident) for name in ("max_memory_allocated", "max_memory_reserved")}
    members |= {
        "_omni_enum": OmniPlatformEnum.OOT,
        "get_diffusion_attn_backend_cls": classmethod(attention),
        "get_torch_device": classmethod(lambda *_args: torch.device("cpu")),
        "get_free_memory": classmethod(lambda *_args: memory()[0]),
        "get_device_memory": classmethod(memory),
    }
    return type("CpuPlatform", (OmniPlatform, Base), members)


def _always(value: Any) -> Any:
    return classmethod(lambda *_args, **_known: value)


def __getattr__(name: str) -> Any:
    """`CpuPlatform`, once vLLM-Omni asks for it: it can not be imported before."""
    if name != "CpuPlatform":
        raise AttributeError(name)
    globals()[name] = made = _platform()
    return made


def write(folder: Path) -> None:
    """A pipeline that vLLM-Omni draws with."""
    import torch  # noqa: PLC0415
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline  # noqa: PLC0415
    from transformers import T5Config, T5EncoderModel, T5Tokenizer  # noqa: PLC0415

    sys.path.insert(0, str(HERE.parent.parent))
    from tests.diffusers.pipelines import tokenizer  # noqa: PLC0415
    from tests.gpu.large_pipelines import SMALL, modules  # noqa: PLC0415

    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    size = SMALL._replace(latent=16, vae=(32, 32, 32, 32), sample=128)
    shape = T5Config(vocab_size=128, d_model=size.joint, d_kv=32, d_ff=256, num_layers=2, num_heads=4)
    letters = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0)]
    letters += [(letter, -2.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    parts = {name: module.to(torch.bfloat16) for name, module in modules(size).items()}
    StableDiffusion3Pipeline(
        **parts,
        text_encoder_3=T5EncoderModel(shape),
        tokenizer_3=T5Tokenizer(vocab=letters, extra_ids=0),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        tokenizer=tokenizer(),
        tokenizer_2=tokenizer(),
    ).save_pretrained(folder)


def run(folder: Path) -> None:
    """Start this file again with the plugin in place."""
    with tempfile.TemporaryDirectory() as place:
        found = Path(place, "upstream_on_cpu-1.dist-info")
        found.mkdir()
        (found / "METADATA").write_text("Metadata-Version: 2.1\nName: upstream-on-cpu\nVersion: 1\n", encoding="utf-8")
        (found / "entry_points.txt").write_text(_ENTRY, encoding="utf-8")
        Path(place, "sitecustomize.py").write_text(_OPERATORS, encoding="utf-8")
        paths = [place, str(HERE.parent), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
        os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "VLLM_NO_USAGE_STATS": "1"}
        code = os.spawnv(os.P_WAIT, sys.executable, [sys.executable, str(HERE), "orders", str(folder)])
    sys.exit(code)


def orders(folder: Path) -> None:
    """Every order once, a line for each."""
    from omni_notebook import UpstreamOmni  # noqa: PLC0415

    engine = UpstreamOmni(str(folder), default_timeout=60.0)
    _say("status", [(rank.rank, rank.pid, rank.process_bytes) for rank in engine.status().stages[0].ranks])

    async def draw() -> str:
        params = {"num_inference_steps": 2, "height": 64, "width": 64, "seed": 1}
        outputs = [out async for out in engine.generate("a red circle", sampling_params=params)]
        return f"{len(outputs[-1].png[0])} bytes of PNG, CRC {zlib.crc32(outputs[-1].png[0]):08x}"

    async def go() -> None:
        steps: dict[str, Callable[[], Awaitable[Any]]] = {
            "draw": draw,
            "pause": engine.pause_generation,
            "resume": engine.resume_generation,
            "check_health": engine.check_health,
            "sleep": lambda: engine.sleep(level=1, raise_on_error=False),
            "wake": lambda: engine.wake_up(raise_on_error=False),
            "draw again": draw,
            "sleep at level 2": lambda: engine.sleep(level=2),
        }
        for name, step in steps.items():
            try:
                _say(name, await step())
            except Exception as error:  # noqa: BLE001  (it is what is to be seen)
                _say(name, f"{type(error).__name__}: {error}")

    try:
        asyncio.run(go())
    finally:
        began_s = time.perf_counter()
        engine.shutdown()
        _say("shutdown", f"{time.perf_counter() - began_s:.1f} s")


def _say(name: str, what: object) -> None:
    sys.stdout.write(f"{name}: {what}\n")
    sys.stdout.flush()


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["write", "run", "orders"])
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args()
    {"write": write, "run": run, "orders": orders}[chosen.what](chosen.folder)


if __name__ == "__main__":
    main()
