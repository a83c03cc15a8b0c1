"""Which 2 MiB chunks of a segment have changed: eight sums a chunk, taken by the device's int8 matrix units.

    inner[r, j] = Σ_k w[j, k] · byte[r, k]      sum[j] = Σ_r v[r] · inner[r, j]  modulo 2^64

over a chunk's 256 rows r of 8192 bytes k, with fixed random weights: w odd in 1 … 127, so that `inner` is exact in
int32, and v odd in 64 bits. A change of one byte always shows; changes of several cancel in all eight sums with a
chance of about 2^-48 or less. One pass over the bytes: 14 GiB in 9 ms on an H200. This finds accidents and writes, not
forgeries. Source: multilinear hashing (Carter and Wegman, 1979).
"""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch

from omni_notebook.memory.arena import CHUNK

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from omni_notebook.memory.device.driver import Driver
    from omni_notebook.memory.device.segments import DeviceSegment

    Sums = NDArray[np.int64]

_SUMS = 8
_ROW = 8192
_ROWS = CHUNK // _ROW


@functools.cache
def _weights() -> tuple[torch.Tensor, torch.Tensor]:
    """The weights on the host: int8 (8, 8192) and int64 (256, 1)."""
    stream = hashlib.shake_128(b"omni_notebook chunk shadow").digest(_SUMS * _ROW + 8 * _ROWS)
    inner = np.frombuffer(stream[: _SUMS * _ROW], np.uint8) & 0x7F | 1
    outer = np.frombuffer(stream[_SUMS * _ROW :], "<i8") | 1
    return (
        torch.from_numpy(inner.astype(np.int8).reshape(_SUMS, _ROW)),
        torch.from_numpy(outer.astype(np.int64).reshape(_ROWS, 1)),
    )


class Begun:
    """Sums that the device takes: kernels now, their results when asked for.

    Between the two may lie copies: results come by the device's copy engine, behind all copies that were begun before.
    """

    def __init__(self, sums: Mapping[DeviceSegment, torch.Tensor]) -> None:
        self._sums = sums

    def wait(self) -> None:
        """Return once the device has read all bytes."""
        for device in {one.device for one in self._sums.values() if one.device.type != "cpu"}:
            torch.accelerator.current_stream(device).synchronize()

    def result(self) -> dict[DeviceSegment, Sums]:
        """Each segment's sums, (chunks, 8)."""
        return {segment: one.cpu().numpy() for segment, one in self._sums.items()}


@torch.inference_mode()
def chunk_sums(parts: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Begin to take the sums, (chunks, 8) int64, of parts: uint8 tensors of one device, whole chunks each."""
    placed: tuple[torch.Tensor, torch.Tensor] | None = None
    begun = []
    for part in parts:
        if placed is None:
            placed = tuple(one.to(part.device) for one in _weights())  # type: ignore[assignment]
        begun.append(_sum(part, *placed))  # type: ignore[misc]
    return begun


def _sum(part: torch.Tensor, inner: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
    rows: torch.Tensor = torch._int_mm(part.view(torch.int8).view(-1, _ROW), inner.t())  # noqa: SLF001 (the only one)
    return (rows.view(-1, _ROWS, _SUMS).to(torch.int64) * outer).sum(1)


class Shadow:
    """Takes sums of segments where the platform can look at their bytes."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._works = True

    def sums(self, segments: Iterable[DeviceSegment]) -> dict[DeviceSegment, Sums]:
        """The sums of those segments that are there; empty where none can be had."""
        return self.begin(segments).result()

    def begin(self, segments: Iterable[DeviceSegment]) -> Begun:
        """Begin to take them; where that can not be, nothing reads the segments any more.

        Raises:
            DeviceError: nobody can tell whether something does.
        """
        several = [one for one in segments if one.mapped and self._driver.is_live(one.allocation)]
        parts = [self._driver.bytes_at(one.address, one.size_bytes) for one in several] if self._works else []
        if any(part is None for part in parts):
            self._works = False
        if not self._works:
            return Begun({})
        try:
            return Begun(dict(zip(several, chunk_sums(parts), strict=True)))  # type: ignore[arg-type]
        except RuntimeError:  # a GPU without int8 matrix units, or no room for the products: copy without looking
            self._driver.enter()
            return Begun({})
