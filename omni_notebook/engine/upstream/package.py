"""The installed `vllm_omni` package: found when an engine is made, never imported before."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import re
import sys
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_notebook.errors import UnsupportedError, UpstreamError

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTED = "0.30"
PIP_LINE = f"pip install 'vllm-omni=={TESTED}.*' 'vllm=={TESTED}.*'"


class UntestedUpstreamWarning(UserWarning):
    """A version of vllm_omni with which this release was not tested."""


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        msg = f"vllm_omni is installed, but {name} can not be imported: {error}; nothing was started. {PIP_LINE}"
        raise UnsupportedError(msg) from error


def check_installed() -> None:
    """Raise UnsupportedError with the line that installs it where the package is not there; imports nothing."""
    if importlib.util.find_spec("vllm_omni") is None:
        msg = f"vllm_omni is not installed here; nothing was started. {PIP_LINE}"
        raise UnsupportedError(msg)


def version() -> str:
    """The package's version as it tells it, "unknown" if it does not."""
    return str(getattr(_import("vllm_omni"), "__version__", "unknown"))


@functools.cache
def warn_if_untested(found: str) -> None:
    """Warn once about a version that is not of the tested series."""
    series = re.match(r"\d+\.\d+", found)
    if series is None or series[0] != TESTED:
        text = f"vllm_omni {found} is untested with this release (tested is {TESTED}); audit before you rely on it"
        warnings.warn(text, UntestedUpstreamWarning, stacklevel=2)


def make(model: str, options: dict[str, Any]) -> Any:
    """A new `vllm_omni` AsyncOmni; it blocks until its stages are ready.

    Raises:
        UnsupportedError: it is not installed, or can not be imported.
        UpstreamError: it did not start; its own words.
    """
    check_installed()
    warn_if_untested(version())
    made = _import("vllm_omni.entrypoints.async_omni").AsyncOmni
    try:
        with _own_output():
            return made(model=model, **options)
    except Exception as error:
        msg = f"vllm_omni did not start {model}: {first_line(error)}; nothing is running"
        raise UpstreamError(msg) from error


@contextlib.contextmanager
def _own_output() -> Iterator[None]:
    """This process writes as before: where a stage runs in it, vllm_omni puts a name before each of its lines."""
    streams = [stream for stream in (sys.stdout, sys.stderr) if hasattr(stream, "__dict__")]
    before = [vars(stream).get("write") for stream in streams]
    try:
        yield
    finally:
        for stream, write in zip(streams, before, strict=True):
            vars(stream).pop("write", None)
            if write is not None:
                vars(stream)["write"] = write


def device_type() -> str:
    """What its ranks compute on, as torch calls it: "cuda", "npu", "xpu", "cpu"."""
    platform = getattr(_import("vllm_omni.platforms"), "current_omni_platform", None)
    return str(getattr(platform, "device_type", "cuda") or "cuda")


def lora_request(name: str, number: int, path: str) -> Any:
    """An adapter in the class that its ranks take."""
    return _import("vllm.lora.request").LoRARequest(lora_name=name, lora_int_id=number, lora_path=path)


def first_line(error: BaseException) -> str:
    """An error's class and its first line; of one without words, where it was raised."""
    lines = str(error).strip().splitlines()
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].name} ({'/'.join(Path(frames[-1].filename).parts[-3:])})" if frames else ""
    return f"{type(error).__name__}: {lines[0]}" if lines else f"{type(error).__name__}{where}"
