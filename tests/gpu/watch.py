"""A process that plays a scenario, watched from outside: its facts as they come, and what NVML sees it hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


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
