"""Which engine a start makes, and which of its options that engine takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_notebook import config
from omni_notebook.errors import ArgumentError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from omni_notebook.engine.async_omni import AsyncOmni
    from omni_notebook.engine.upstream.engine import UpstreamOmni

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


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Which engine is started."""
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default=EMBEDDED,
        help="embedded (default), or an installed vllm_omni: docs/upstream.md says what is measured there by whom",
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
        msg = "--engine vllm-omni has no demo pipeline: name a model that vLLM-Omni takes. Nothing was started"
        raise ArgumentError(msg)
    wrong = sorted(set(options) - _PASSED_ON)
    if wrong:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        msg = f"{names}: for the embedded engine only; vllm_omni's own options go in --engine-args. Nothing was started"
        raise ArgumentError(msg)
    package.check_installed()


def build(
    kind: str, model: str, options: dict[str, Any], report: Callable[[str, float], None]
) -> AsyncOmni | UpstreamOmni:
    """The engine, ready; `options` may also have `enable_sleep_mode`."""
    engine: AsyncOmni | UpstreamOmni
    if kind == EMBEDDED:
        from omni_notebook.engine.async_omni import AsyncOmni  # noqa: PLC0415  (torch: loaded when used)

        engine = AsyncOmni(model, progress=report, **options)
    else:
        from omni_notebook.engine.upstream.engine import UpstreamOmni  # noqa: PLC0415  (torch: loaded when used)

        own = {name: value for name, value in options.items() if name != "engine_args"}
        engine = UpstreamOmni(model, progress=report, **{**options.get("engine_args", {}), **own})
    return engine
