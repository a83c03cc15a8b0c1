"""What a process holds on an NPU, as `npu-smi` prints it, and what all hold, as CANN tells it.

Source: npu-smi command reference (`info -m`, `info -t proc-mem`), pyACL reference (`acl.rt.get_mem_info`). Not run on
hardware.
"""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING, Any, NamedTuple

from omni_notebook.memory.device.measuring import device_lock, not_measured

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

_HBM = 1  # ACL_HBM_MEM
_MIB = 1024**2
_TIMEOUT_S = 10
_CHIP = re.compile(r"^\s*(?P<card>\d+)\s+(?P<chip>\d+)\s+(?P<logic>\d+)\s")
_PROCESS = re.compile(r"Process id\s*:\s*(\d+).*?Process memory\(MB\)\s*:\s*(\d+)")


class _Chip(NamedTuple):
    card: int
    chip: int


class NpuProbe:
    """Measures one NPU for this process.

    Args:
        index: torch's number of the device.
        runtime: pyACL's `acl.rt`.
        run: carries an `npu-smi` command out and returns what it prints; raises OSError or `subprocess` errors.
        environ: where the visible devices are named.
    """

    device_source = "acl.rt.get_mem_info"

    def __init__(
        self,
        index: int,
        runtime: Any,
        *,
        run: Callable[[tuple[str, ...]], str] | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._acl = runtime
        self._run = run or _npu_smi
        self._pid = os.getpid()
        logic = _logic_id(index, environ)
        self._name = f"npu-{index if logic is None else logic}"
        self._chip = self._find_chip(logic)

    def _find_chip(self, logic: int | None) -> _Chip | None:
        try:
            lines = self._run(("info", "-m")).splitlines()
        except (OSError, subprocess.SubprocessError):
            return None
        found = [match for line in lines if (match := _CHIP.match(line)) and int(match["logic"]) == logic]
        return _Chip(int(found[0]["card"]), int(found[0]["chip"])) if len(found) == 1 else None

    def process_bytes(self) -> int | None:
        """See `Probe.process_bytes`, in whole MiB; None also where npu-smi is not there."""
        if self._chip is None:
            return None
        card, chip = map(str, self._chip)
        try:
            printed = self._run(("info", "-t", "proc-mem", "-i", card, "-c", chip))
        except (OSError, subprocess.SubprocessError) as error:
            raise not_measured(error, source="npu-smi") from error
        ours = [int(n_mib) * _MIB for pid, n_mib in _PROCESS.findall(printed) if int(pid) == self._pid]
        return sum(ours) if ours else None

    def device_bytes(self) -> int:
        """See `Probe.device_bytes`."""
        free, total, error = self._acl.get_mem_info(_HBM)
        if error:
            text = f"error {error}"
            raise not_measured(text, source="acl.rt.get_mem_info")
        return int(total - free)

    def exclusive(self) -> AbstractContextManager[bool]:
        """See `device_lock`."""
        return device_lock(self._name)


def _logic_id(index: int, environ: Mapping[str, str]) -> int | None:
    """npu-smi's "Chip Logic ID" of torch's device, or None where the variable does not say."""
    visible = environ.get("ASCEND_RT_VISIBLE_DEVICES", "").strip()
    if not visible:
        return index
    ids = visible.split(",")
    return int(ids[index]) if index < len(ids) and ids[index].strip().isdigit() else None


def _npu_smi(arguments: tuple[str, ...]) -> str:
    command = ("npu-smi", *arguments)
    done = subprocess.run(  # noqa: S603  (fixed words and numbers)
        command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S, process_group=0
    )
    return done.stdout
