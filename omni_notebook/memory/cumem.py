"""GPUs and NPUs for vLLM stages: a pool over the segments that vLLM's allocator for the device allocated."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NoReturn

from omni_notebook.errors import UnsupportedError
from omni_notebook.memory.base import KV_CACHE, WEIGHTS
from omni_notebook.memory.device.pool import DevicePool
from omni_notebook.memory.device.settings import refuse_expandable_segments

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from omni_notebook.memory.device.driver import Driver, Probe


class CumemPool(DevicePool):
    """One rank's memory that vLLM allocated under tags; fills `memory.base.MemoryPool`.

    vLLM's tags `weights` and `kv_cache` mean what they mean elsewhere; `workspace` is dropped like `kv_cache`; any
    other tag is backed up whole at every level, because no checkpoint has it. Tensors keep their addresses. Freeing
    those of a tag that sleeps is legal. Segments that vLLM allocates in a tag that sleeps are not part of that sleep.

    Args:
        driver, probe, options: see `DevicePool`.

    Raises:
        UnsupportedError: expandable segments are on.
    """

    def __init__(self, driver: Driver, probe: Probe, **options: Any) -> None:
        super().__init__(driver, probe, expected_tags=(WEIGHTS, KV_CACHE), **options)

    # ------------------------------------------------------------------------------------- contents

    def adopt(self, module: nn.Module, tag: str = WEIGHTS) -> None:
        """Register a module whose tensors vLLM allocated under `tag`; nothing moves.

        Its tensors that lie in another tag's segments are kept there at every level; `untagged` names those that lie
        in none, which no sleep touches.

        Raises:
            ArgumentError: vLLM has no such tag.
        """
        with self._lock:
            self._core.check_open("adopt")
            self._core.refresh()
            self._core.books.named((tag,))
            self._core.modules.add(module, tag)
            self._core.count_used()

    def empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        tag: str = KV_CACHE,
        *,
        recomputable: bool = True,  # noqa: ARG002
    ) -> NoReturn:
        """Refuse: vLLM allocates.

        Raises:
            UnsupportedError: always.
        """
        msg = (
            f"a tensor of shape {tuple(shape)} and {dtype} for {tag!r}: this pool manages what vLLM has allocated and "
            "makes no tensors of its own; leave ballast_bytes at 0 for a vLLM stage on CUDA"
        )
        raise UnsupportedError(msg)

    def keep(self, tag: str, tensors: Sequence[torch.Tensor]) -> None:
        """Name tensors whose contents every level keeps on the host; may be called again for later ones.

        A tensor that lies in another tag is kept there; one that lies in none is left alone, as every sleep does.

        Raises:
            ArgumentError: vLLM has no such tag.
        """
        with self._lock:
            self._core.refresh()
            self._core.books.named((tag,))
            for tensor in tensors:
                self._core.keep(tensor)

    def discard(self, tag: str) -> NoReturn:
        """Refuse: vLLM frees.

        Raises:
            UnsupportedError: always.
        """
        msg = f"discard({tag!r}): this memory is vLLM's, which alone can free it; nothing changed"
        raise UnsupportedError(msg)

    # --------------------------------------------------------------------------------------- looking

    def loose_tensors(self, tag: str) -> list[torch.Tensor]:
        """The bytes (uint8) of living tensors in `tag` that no adopted module has: workspaces, scales, tables.

        Raises:
            ArgumentError: vLLM has no such tag.
        """
        with self._lock:
            self._core.refresh()
            self._core.books.named((tag,))
            return self._core.modules.loose(tag)

    def untagged(self) -> dict[str, int]:
        """Tensors of adopted modules that lie in none of vLLM's segments: name → bytes. No sleep frees them."""
        with self._lock:
            return self._core.modules.untagged()

    def foreign_changes(self) -> str | None:
        """What somebody else, vLLM's own sleep or wake, did to the segments behind our books; None: nothing."""
        with self._lock:
            strangers = self._core.table.strangers()
        if not strangers:
            return None
        names = ", ".join(sorted({segment.tag for segment in strangers}))
        how = "unmapped" if strangers[0].mapped else "mapped"
        return f"{len(strangers)} segments of {names} were {how} by somebody else (vLLM's own sleep or wake_up)"


def cumem_pool(index: int) -> CumemPool:
    """The pool over vLLM's allocator in this process, for torch's device `index`; vLLM has loaded its model.

    Raises:
        UnsupportedError: there is no CUDA device or no such allocator, vLLM does not use it, or expandable segments are
            on.
    """
    refuse_expandable_segments(os.environ)
    from omni_notebook.memory.device.nvml import nvml_probe  # noqa: PLC0415  (these touch the device)
    from omni_notebook.memory.device.vllm_driver import vllm_driver  # noqa: PLC0415

    return pool_over(vllm_driver(index), nvml_probe(index))


def pool_over(driver: Driver, probe: Probe) -> CumemPool:
    """The pool over what vLLM has allocated through `driver`'s allocator.

    Raises:
        UnsupportedError: that is nothing, or expandable segments are on.
    """
    if not driver.allocations():
        msg = (
            f"vLLM has allocated nothing on {driver.device} that can be unmapped; start it with "
            "enable_sleep_mode=True, and make the pool once its model is loaded"
        )
        raise UnsupportedError(msg)
    pool = CumemPool(driver, probe)
    pool.watch_host()
    return pool
