"""A process that plays a scenario, watched from outside: its facts as they come, and what NVML sees it hold.

`OMNI_GPU_REHEARSAL=1` lets tests that know of it run small and on a CPU, so that a GPU meets no misspelt word.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
ON_CUDA = torch.cuda.is_available()
REHEARSAL = not ON_CUDA and os.environ.get("OMNI_GPU_REHEARSAL") == "1"
DEVICE = "cuda" if ON_CUDA else "cpu"
HOG = """
import torch
free = torch.cuda.mem_get_info()[0]
taken = torch.empty(free - (64 << 20), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("full", flush=True)
input()
"""


class Child:
    """A process that plays a scenario of a module; iterating gives its facts, the child waiting meanwhile."""

    def __init__(self, module: str, scenario: str, **environment: str) -> None:
        self.errors = ""
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, scenario],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )

    def __iter__(self):
        for line in self._process.stdout:
            if line.startswith("FACT "):
                facts = json.loads(line.removeprefix("FACT "))
                print(facts)
                yield facts
                self._process.stdin.write("\n")
                self._process.stdin.flush()
        with self._process, self._stderr:
            code = self._process.wait(60)
            self._stderr.seek(0)
            self.errors = self._stderr.read()
        assert code == 0, self.errors[-4000:]


def tell(scenarios) -> None:
    """The child's side: play the scenario that the command line names."""
    for facts in scenarios[sys.argv[1]]():
        torch.cuda.empty_cache()
        print("FACT", json.dumps({"pid": os.getpid(), **facts}), flush=True)
        sys.stdin.readline()
    sys.stdout.flush()
    os._exit(0)  # torch may abort when a memory pool dies with the interpreter (pytorch issue 145168)


def seen_by_nvml(pid: int, index: int = 0) -> int:
    """What a process holds on a device, asked from outside it."""
    import pynvml

    pynvml.nvmlInit()
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    return sum(one.usedGpuMemory for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if one.pid == pid)


def seen_from_outside(pid: int) -> int:
    """`seen_by_nvml`; in a rehearsal the private memory that the kernel counts."""
    if ON_CUDA:
        return seen_by_nvml(pid)
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return int(re.search(r"^Anonymous:\s+(\d+) kB", text, re.MULTILINE)[1]) * 1024


@contextlib.contextmanager
def full_device():
    """The first GPU made full by another process; after it there is room again."""
    free = torch.cuda.mem_get_info(0)[0]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen([sys.executable, "-c", HOG], process_group=0, **pipes) as hog:
        try:
            assert hog.stdout.readline() == "full\n"
            yield
            hog.communicate("\n")
        finally:
            hog.kill()
    deadline = time.monotonic() + 30
    while torch.cuda.mem_get_info(0)[0] < free - 1024**3 and time.monotonic() < deadline:
        time.sleep(0.05)


def link_gb_per_s() -> dict[str, float]:
    """What pinned copies of 1 GiB reach, out of the device and in: the best of four."""
    if not ON_CUDA:
        return {}
    host = torch.empty(1024**3, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    took_s: dict[str, list[float]] = {"out": [], "in": []}
    for _ in range(4):
        for name, target, source in (("out", host, device), ("in", device, host)):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            took_s[name].append(time.perf_counter() - began_s)
    del host, device
    give_back()
    return {name: 1024**3 / 1e9 / min(several) for name, several in took_s.items()}


def give_back() -> None:
    """What this process no longer uses of a GPU goes back to it."""
    gc.collect()
    if ON_CUDA:
        torch.cuda.empty_cache()
