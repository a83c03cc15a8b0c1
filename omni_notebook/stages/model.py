"""What differs between the kinds of stage: how a request is made, and who schedules it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from omni_notebook.config import StageConfig
    from omni_notebook.protocol import OmniSamplingParams
    from omni_notebook.stages.lora import StageLoras
    from omni_notebook.stages.requests import StageOutput
    from omni_notebook.stages.scheduler import Scheduler
    from omni_notebook.stages.vllm_scheduler import VllmScheduler
    from omni_notebook.transport.connector import Connector


class StageModel(Protocol):
    """One kind of stage."""

    output_type: str
    unadaptable: str | None
    """Why this model takes no LoRA adapters at all; None: `adaptable` says what it takes."""

    @property
    def adaptable(self) -> dict[str, tuple[int, int]]:
        """The shapes (out, in) of the weights that a LoRA adapter can change, by the names of their layers."""
        ...

    def make_scheduler(self, connector: Connector | None, loras: StageLoras) -> Scheduler | VllmScheduler:
        """A scheduler for one replica; `connector` leads to the next stage, if there is one."""
        ...

    def check(self, params: OmniSamplingParams) -> None:
        """Raise ArgumentError if this model can not follow a parameter."""
        ...

    def first(self, prompt: Any, params: OmniSamplingParams) -> Any:
        """The payload for a request that begins here.

        Raises:
            ArgumentError: the prompt or a parameter does not fit this model.
        """
        ...

    def following(self, upstream: StageOutput, params: OmniSamplingParams) -> Any:
        """The payload for a request that comes from the stage before.

        Raises:
            ArgumentError: what came can not be used.
        """
        ...


def make_model(config: StageConfig) -> StageModel:
    """The stage model for a config's kind.

    Raises:
        ConfigError: the model folder does not fit.
    """
    if config.runtime_name == "vllm":
        from omni_notebook.stages.ar_vllm import ArVllmModel  # noqa: PLC0415  (loads only what is used)

        return ArVllmModel(config)
    if config.kind == "ar":
        from omni_notebook.stages.ar_torch import ArTorchModel  # noqa: PLC0415  (loads only what is used)

        return ArTorchModel(config)
    if config.runtime_name == "diffusers":
        from omni_notebook.stages.diffusers import DiffusersModel  # noqa: PLC0415

        return DiffusersModel(config)
    from omni_notebook.stages.diffusion import DiffusionModel  # noqa: PLC0415

    return DiffusionModel(config)
