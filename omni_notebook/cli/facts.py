"""Facts about this machine, gathered without loading torch into this process."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import get_args

import msgspec
import psutil

import omni_notebook
from omni_notebook.cli.probe import Probe
from omni_notebook.config import DEMO_FOLDER, ExecutorName, StageConfig, runtimes
from omni_notebook.errors import UnsupportedError
from omni_notebook.memory import host
from omni_notebook.protocol import GIB, gib

NEEDED = ("torch", "numpy", "safetensors", "tokenizers", "pillow")
FOR_NOTEBOOKS = ("ipython", "ipywidgets", "ipykernel", "jupyterlab")
DEMO_NEEDS_BYTES = GIB  # a process with torch, both stages and 2 × 256 MiB of ballast: 0.9 GiB

NOT_ON_HARDWARE = "not run on hardware"

_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PROBE_S = 120
_OPTION = re.compile(r"^\w+='\w+'(?:: | is )")  # doctor's rows begin with the name already


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Host RAM that this process may use, bytes."""

    limit_bytes: int
    available_bytes: int
    machine_bytes: int
    limited_by_cgroup: bool


class SpillFolder(msgspec.Struct, frozen=True, kw_only=True):
    """Where level 1 keeps its copies; free is None where it can not be written."""

    folder: str
    free_bytes: int | None
    in_ram: bool


class Support(msgspec.Struct, frozen=True, kw_only=True):
    """Whether something works here, and how, or why not."""

    name: str
    supported: bool
    reason: str


class DemoVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the demo can run; the reasons why not."""

    can_run: bool
    reasons: list[str]


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `omni-notebook doctor` says; `probe` is None where torch does not load."""

    version: str
    python: str
    system: str
    kernel: str
    processor: str
    usable_cpus: int
    memory: Memory
    spill: SpillFolder
    huge_pages: str | None
    packages: dict[str, str | None]
    probe: Probe | None
    platforms: list[Support]
    runtimes: list[Support]
    executors: list[Support]
    demo: DemoVerdict


def gather() -> Facts:
    """Look at everything."""
    packages = {name: _installed(name) for name in (*NEEDED, *FOR_NOTEBOOKS)}
    memory, spill = _memory(), _spill_folder()
    missing = [name for name in NEEDED if packages[name] is None]
    probe = _missing(missing) if missing else _run_probe()
    platforms = _platforms(probe)
    reasons = [*_why_not(probe), *_no_weights(), *_no_room(memory, spill)]
    return Facts(
        version=omni_notebook.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        kernel=platform.release(),
        processor=host.cpu_name(),
        usable_cpus=host.usable_cpus(),
        memory=memory,
        spill=spill,
        huge_pages=_huge_pages(),
        packages=packages,
        probe=None if isinstance(probe, str) else probe,
        platforms=platforms,
        runtimes=[_support(name, runtime=name) for name in runtimes() if name != "auto"],
        executors=[_support(name, executor=name) for name in get_args(ExecutorName)],
        demo=DemoVerdict(can_run=not reasons, reasons=reasons),
    )


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _memory() -> Memory:
    room, machine = host.host_memory(), psutil.virtual_memory().total
    return Memory(
        limit_bytes=room.limit_bytes,
        available_bytes=room.available_bytes,
        machine_bytes=machine,
        limited_by_cgroup=room.limit_bytes < machine,
    )


def _spill_folder() -> SpillFolder:
    folder = tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(dir=folder):
            return SpillFolder(folder=folder, free_bytes=host.disk_free_bytes(folder), in_ram=host.is_in_ram(folder))
    except (OSError, AttributeError):  # AttributeError: a system without statvfs
        return SpillFolder(folder=folder, free_bytes=None, in_ram=False)


def _huge_pages() -> str | None:
    """The mode that the kernel puts in brackets: "always", "madvise" or "never"."""
    try:
        modes = _THP.read_text(encoding="ascii")
    except OSError:
        return None
    return modes.partition("[")[2].partition("]")[0] or None


def _missing(names: list[str]) -> str:
    verb = "is" if len(names) == 1 else "are"
    return f"{', '.join(names)} {verb} not installed: pip install {' '.join(names)}"


def _run_probe() -> Probe | str:
    """What torch and the platforms say, or why torch does not load."""
    command = [sys.executable, "-m", Probe.__module__]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PROBE_S)  # noqa: S603  (ours)
    except subprocess.TimeoutExpired:
        return f"torch did not load in {_PROBE_S} s"
    if done.returncode == 0:
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=Probe)
    lines = done.stderr.strip().splitlines()
    return f"torch does not load (status {done.returncode})" + (f": {lines[-1]}" if lines else "")


def _platforms(probe: Probe | str) -> list[Support]:
    if isinstance(probe, str):
        return [Support(name="cpu", supported=False, reason=probe)]
    return [
        Support(
            name=one.platform,
            supported=one.supported,
            reason=one.reason + ("" if one.run_on_hardware else f"; {NOT_ON_HARDWARE}"),
        )
        for one in probe.platforms
    ]


def _support(name: str, **option: str) -> Support:
    """Ask the configuration itself."""
    try:
        StageConfig(kind="diffusion" if name == "diffusers" else "ar", model=name, **option)  # type: ignore[arg-type]
    except UnsupportedError as error:
        reason = str(error).partition(": ")[2].partition("; nothing was started")[0]
        reason = _OPTION.sub("", reason)
        return Support(name=name, supported=False, reason=reason)
    return Support(name=name, supported=True, reason="in this release")


def _why_not(probe: Probe | str) -> list[str]:
    if isinstance(probe, str):
        return [probe]
    return [one.reason for one in probe.platforms if one.platform == "cpu" and not one.supported]


def _no_weights() -> list[str]:
    if all((DEMO_FOLDER / part / "model.safetensors").is_file() for part in ("thinker", "dit")):
        return []
    return [f"the demo's weights are not in {DEMO_FOLDER}: install the package again"]


def _no_room(memory: Memory, spill: SpillFolder) -> list[str]:
    reasons = []
    if memory.available_bytes < DEMO_NEEDS_BYTES:
        free, needed = gib(memory.available_bytes), gib(DEMO_NEEDS_BYTES)
        reasons.append(f"{free} GiB of memory are free and it takes about {needed} GiB; try it with --ballast 0")
    if spill.free_bytes is None:
        reasons.append(f"{spill.folder} can not be written: set TMPDIR to a folder that can")
    return reasons
