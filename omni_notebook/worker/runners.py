"""Which runner runs a stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_notebook.config import StageConfig
    from omni_notebook.worker.runner import Runner


def make_runner(config: StageConfig, parallel_size: int = 1) -> Runner:
    """The runner for a stage's kind, as one of `parallel_size` ranks.

    Raises:
        ConfigError: the model folder does not fit the runner, or the model can not be split over so many ranks.
    """
    if config.kind == "ar":
        from omni_notebook.worker.ar_runner import ArRunner  # noqa: PLC0415  (loads only what is used)

        return ArRunner(config, parallel_size)
    if config.runtime_name == "diffusers":
        from omni_notebook.worker.diffusers.runner import DiffusersRunner  # noqa: PLC0415

        return DiffusersRunner(config, parallel_size)
    from omni_notebook.worker.diffusion_runner import DiffusionRunner  # noqa: PLC0415

    return DiffusionRunner(config, parallel_size)
