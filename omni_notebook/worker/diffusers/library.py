"""What is asked of diffusers and transformers: to load, and to be quiet while they do."""

from __future__ import annotations

import contextlib
import inspect
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_notebook.errors import ConfigError, OmniError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import nn

    from omni_notebook.config import StageConfig
    from omni_notebook.models.pipeline_folder import Component, PipelineFolder

NEEDED = ("prompt", "num_inference_steps", "guidance_scale", "generator", "output_type")
"""What a pipeline's call must take."""
_loading = threading.Lock()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """No log lines, progress bars and warnings of the libraries: a rank may be a thread of a notebook.

    One thread of a process at a time, because the switches belong to the process.
    """
    with _loading, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils import logging as of_transformers  # noqa: PLC0415  (heavy: where a pipeline is loaded)

        with _silent(of_transformers):
            from diffusers.utils import logging as of_diffusers  # noqa: PLC0415

            with _silent(of_diffusers):
                yield


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """No log lines of the libraries while a pipeline draws."""
    from diffusers.utils import logging as of_diffusers  # noqa: PLC0415  (heavy: where a pipeline is loaded)
    from transformers.utils import logging as of_transformers  # noqa: PLC0415

    with _silent(of_transformers), _silent(of_diffusers):
        yield


@contextlib.contextmanager
def _silent(logging: Any) -> Iterator[None]:
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def named(what: object) -> Iterator[None]:
    """What the libraries raise, as one line that names `what`."""
    try:
        yield
    except OmniError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError) as error:
        msg = f"{what} can not be loaded by diffusers: {first_line(error)}"
        raise ConfigError(msg) from error


def first_line(error: BaseException) -> str:
    """An error's first line that says something, with its class where it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def find_folder(model: str) -> Path:
    """A pipeline's folder; one that is named as on the Hugging Face hub is fetched first, or found in its cache.

    Raises:
        ConfigError: it is neither a folder, nor can be fetched.
    """
    if Path(model).is_dir():
        return Path(model).resolve()
    with quietly(), named(model):
        from diffusers import DiffusionPipeline  # noqa: PLC0415

        return Path(DiffusionPipeline.download(model, use_safetensors=True))


def load_pipeline(source: PipelineFolder, config: StageConfig, dtype: torch.dtype) -> Any:
    """A pipeline with its weights, in ordinary memory.

    Raises:
        ConfigError: diffusers can not load it.
        UnsupportedError: it does not draw images from a prompt.
    """
    folder = source.folder
    with quietly(), named(folder):
        from diffusers import DiffusionPipeline  # noqa: PLC0415

        pipe: Any = DiffusionPipeline.from_pretrained(
            str(folder),
            torch_dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=config.trust_remote_code,
            **dict.fromkeys(source.absent),
        )
    taken = inspect.signature(pipe.__call__).parameters
    lacking = [name for name in NEEDED if name not in taken]
    if lacking:
        msg = (
            f"{folder}: {type(pipe).__name__} takes no {', '.join(lacking)}; only pipelines that draw images from a "
            "prompt can be a stage"
        )
        raise UnsupportedError(msg)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def step_callback(pipe: Any, after_step: Callable[[int], None]) -> dict[str, Any]:
    """How to have a pipeline call `after_step(index)` after each step, as arguments of its call.

    Nothing, where it calls nobody: such a batch ends by itself.
    """

    def of_today(_pipe: Any, index: int, _time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        after_step(index)
        return tensors

    taken = inspect.signature(pipe.__call__).parameters
    if "callback_on_step_end" in taken:
        return {"callback_on_step_end": of_today}
    if {"callback", "callback_steps"} <= taken.keys():
        return {"callback": lambda index, _time, _latents: after_step(index), "callback_steps": 1}
    return {}


def load_model(kind: type[nn.Module], component: Component, dtype: torch.dtype) -> nn.Module:
    """One sub-model with its weights, in ordinary memory; `kind`: its class.

    Raises:
        ConfigError: its library can not load it.
    """
    with quietly(), named(component.folder):
        from diffusers import ModelMixin  # noqa: PLC0415

        key = "torch_dtype" if issubclass(kind, ModelMixin) else "dtype"
        known = {key: dtype, "use_safetensors": True, "local_files_only": True}
        model: nn.Module = kind.from_pretrained(str(component.folder), **known)  # type: ignore[attr-defined]
        return model.eval()
