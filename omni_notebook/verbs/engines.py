"""Which engine a start makes, and which of its options that engine takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_notebook import config
from omni_notebook.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_notebook.verbs.engine_api import Engine

EMBEDDED, UPSTREAM = "embedded", "vllm-omni"
ENGINES = (EMBEDDED, UPSTREAM)

_PASSED_ON = frozenset(
    {
        "tensor_parallel_size",
        "gpu_memory_utilization",
        "trust_remote_code",
        "dtype",
        "max_loras",
        "max_lora_rank",
        "step_execution",
        "default_timeout",
        "engine_args",
    }
)


def check(kind: str, model: str, options: dict[str, Any]) -> None:
    """Refuse what can not be started, before anything is.

    Raises:
        ArgumentError: an option that this engine does not take, or no model.
        ConfigError: a bad model, pipeline file or option.
        UnsupportedError: the engine's package is not installed.
    """
    if kind == EMBEDDED:
        config.load_pipeline(model, overrides=options)
        return
    from omni_notebook.engine.upstream import package  # noqa: PLC0415  (the embedded engine does not need it)

    if model == config.DEMO:
        msg = "--engine vllm-omni has no demo pipeline: name a model, %omni start MODEL --engine vllm-omni"
        raise ArgumentError(msg)
    wrong = sorted(set(options) - _PASSED_ON)
    if wrong:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        msg = f"{names}: for the embedded engine only; vllm_omni's own options go in --engine-args. Nothing was started"
        raise ArgumentError(msg)
    package.check_installed()


def build(kind: str, model: str, options: dict[str, Any], report: Callable[[str, float], None]) -> Engine:
    """The engine, ready."""
    engine: Engine
    if kind == EMBEDDED:
        from omni_notebook.engine.async_omni import AsyncOmni  # noqa: PLC0415  (torch: loaded when used)

        engine = AsyncOmni(model, progress=report, **options)
    else:
        from omni_notebook.engine.upstream.engine import UpstreamOmni  # noqa: PLC0415  (torch: loaded when used)

        own = {name: value for name, value in options.items() if name != "engine_args"}
        engine = UpstreamOmni(model, progress=report, **{**options.get("engine_args", {}), **own})
    return engine
