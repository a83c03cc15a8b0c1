"""Settings of torch's allocator that a pool can not live with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_notebook.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF")


def refuse_expandable_segments(environ: Mapping[str, str]) -> None:
    """Refuse torch's expandable segments: they take memory where no pool sees it.

    Raises:
        UnsupportedError: they are on; names the variable.
    """
    for name in _VARIABLES:
        for setting in environ.get(name, "").split(","):
            key, _, value = setting.partition(":")
            if key.strip() == "expandable_segments" and value.strip().lower() in {"true", "1"}:
                msg = (
                    f"{name} turns expandable_segments on; torch then keeps memory that no sleep can give back. "
                    "Take the setting out and start again"
                )
                raise UnsupportedError(msg)
