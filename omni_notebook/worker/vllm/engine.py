"""Where vLLM's own classes are used: how an `AsyncLLM` is made, asked, and ended. Imported by the host process alone."""

from __future__ import annotations

import contextlib
import os
import re
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_notebook.errors import ConfigError
from omni_notebook.models.tokenizer import GRAMMAR_FILE
from omni_notebook.protocol import MIB
from omni_notebook.worker.vllm.wire import TextOutput

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from omni_notebook.config import StageConfig
    from omni_notebook.worker.reports import WorkerSpec
    from omni_notebook.worker.vllm.wire import TextRequest

EXTENSION = "omni_notebook.worker.vllm.extension.OmniWorkerExtension"
GRAMMAR = "omni_notebook.worker.vllm.grammar:PlanGrammarProcessor"
CPU_KV_BYTES = 1024 * MIB
"""A CPU's KV cache where nobody says how large it shall be; vLLM would take most of the machine."""
OURS = frozenset({"model", "worker_extension_cls", "enable_sleep_mode", "tensor_parallel_size", "pipeline_parallel_size"})
"""What `engine_args` may not set: the stage's config does, or our orders depend on it."""


def prepare_environment(config: StageConfig, folder: Path) -> None:
    """Set what vLLM reads from the environment, before it is imported; what the user has set stays."""
    ours = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
    }
    for name, value in ours.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_RPC_BASE_PATH"] = str(folder)
    if config.tensor_parallel_size > 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", _binding(config.tensor_parallel_size))


def _binding(ranks: int) -> str:
    """Which processors each rank's threads run on: the usable ones, split evenly."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < ranks:
        return "nobind"
    bounds = [len(cpus) * n // ranks for n in range(ranks + 1)]
    return "|".join(",".join(map(str, cpus[low:high])) for low, high in zip(bounds, bounds[1:], strict=False))


async def make(spec: WorkerSpec, folder: Path) -> Any:
    """An `AsyncLLM` for a stage's config, ready.

    Raises:
        ConfigError: an argument that vLLM does not have.
        Exception: what vLLM raised.
    """
    config = spec.config
    prepare_environment(config, folder)
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415  (after the environment)
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    try:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(spec)))
    except (TypeError, ValueError) as error:  # pydantic's among them
        msg = f"stage {config.title}: vLLM {installed_version()} refuses this: {one_line(error)}. Nothing was started"
        raise ConfigError(msg) from error


def one_line(error: BaseException) -> str:
    """What an error says, without what pydantic puts around it."""
    text = " ".join(str(error).split())
    found = re.search(r"(?:Value error, |Assertion failed, )(.*?)(?: \[type=|$)", text)
    return (found[1] if found else text).rstrip(".")


def engine_arguments(spec: WorkerSpec) -> dict[str, Any]:
    """What vLLM is started with: the stage's options, then `engine_args`."""
    from vllm.platforms import current_platform  # noqa: PLC0415

    config = spec.config
    arguments: dict[str, Any] = {
        "model": config.model,
        "tensor_parallel_size": config.tensor_parallel_size,
        "dtype": config.dtype,
        "max_num_seqs": config.max_num_seqs,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "trust_remote_code": config.trust_remote_code,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "worker_extension_cls": EXTENSION,
    }
    if config.max_model_len is not None:
        arguments["max_model_len"] = config.max_model_len
    if current_platform.is_cpu():
        arguments["dtype"] = "float32" if config.dtype == "auto" else config.dtype
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            arguments["kv_cache_memory_bytes"] = CPU_KV_BYTES
    else:
        arguments["enable_sleep_mode"] = True
    if (Path(config.model) / GRAMMAR_FILE).is_file():
        arguments["logits_processors"] = [GRAMMAR]
    if not (Path(config.model) / "tokenizer_config.json").exists() and Path(config.model).is_dir():
        arguments["skip_tokenizer_init"] = True
    arguments.update(config.engine_args)
    return arguments


def installed_version() -> str:
    """The version of the vLLM that is installed."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "unknown"


def makes_weights_up(llm: Any) -> bool:
    """Whether the weights come from no file."""
    return str(llm.vllm_config.load_config.load_format) == "dummy"


def folder_of(llm: Any) -> Path:
    """The folder of the checkpoint that vLLM has loaded."""
    name = llm.vllm_config.model_config.model
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download  # noqa: PLC0415  (vLLM has it; a local folder does not need it)

    revision = llm.vllm_config.model_config.revision
    return Path(snapshot_download(name, revision=revision, local_files_only=True))


def generate(llm: Any, request: TextRequest) -> AsyncIterator[Any]:
    """vLLM's outputs of one request, each with what is new since the last."""
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

    params = SamplingParams(
        max_tokens=request.max_tokens - len(request.generated),
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        stop_token_ids=list(request.stop_token_ids),
        output_kind=RequestOutputKind.DELTA,
    )
    prompt: Any = request.prompt
    if not isinstance(prompt, str):
        prompt = {"prompt_token_ids": [*prompt, *request.generated]}
    outputs: AsyncIterator[Any] = llm.generate(prompt, params, request.request_id)
    return outputs


def news(request: TextRequest, output: Any, *, first: bool) -> TextOutput:
    """What an output of vLLM's says that is new; an end token is not one of the text's."""
    (one,) = output.outputs
    token_ids = tuple(one.token_ids)
    ended_by_token = one.finish_reason == "stop" and not isinstance(one.stop_reason, str)
    if ended_by_token and token_ids:
        token_ids = token_ids[:-1]
    return TextOutput(
        request_id=request.request_id,
        token_ids=token_ids,
        text=one.text,
        finish_reason=one.finish_reason,
        prompt_token_ids=tuple(output.prompt_token_ids or ()) if first else None,
        cached_tokens=output.num_cached_tokens if first else None,
    )
