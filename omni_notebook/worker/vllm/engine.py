"""Where vLLM's own classes are used: how an `AsyncLLM` is made and asked. Only the host process imports this."""

from __future__ import annotations

import copy
import itertools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_notebook.config import GRAMMAR_FILE
from omni_notebook.errors import ConfigError, UnsupportedError
from omni_notebook.protocol import MIB
from omni_notebook.worker.threads import waiting_threads_sleep
from omni_notebook.worker.vllm.versions import TESTED, vllm_version
from omni_notebook.worker.vllm.wire import TextOutput

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from omni_notebook.config import StageConfig
    from omni_notebook.protocol import LoRARequest
    from omni_notebook.worker.reports import WorkerSpec
    from omni_notebook.worker.vllm.wire import TextRequest

EXTENSION = "omni_notebook.worker.vllm.extension.OmniWorkerExtension"
GRAMMAR = "omni_notebook.worker.vllm.grammar:PlanGrammarProcessor"
GENERATED = "omni_generated"
"""The extra argument of a request that says how many tokens at its prompt's end were generated before a restart."""
CPU_KV_BYTES = 1024 * MIB
"""A CPU's KV cache where nobody says how large it shall be; vLLM would take most of the machine."""
ADAPTERS_KEPT = 100_000
"""How many adapters a rank keeps in host memory: all. One that vLLM drops it reads again from files that may be gone,
or another adapter's by then."""
NEEDED = (
    "abort",
    "collective_rpc",
    "from_engine_args",
    "generate",
    "pause_generation",
    "reset_encoder_cache",
    "reset_mm_cache",
    "reset_prefix_cache",
    "resume_generation",
)
"""What we call of `AsyncLLM`."""


def prepare_environment(config: StageConfig, folder: Path) -> None:
    """Set what vLLM reads from the environment, before it is imported; what the user has set stays."""
    ours = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
    }
    for name, value in (ours | waiting_threads_sleep(os.environ)).items():
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
    return "|".join(",".join(map(str, cpus[low:high])) for low, high in itertools.pairwise(bounds))


async def make(spec: WorkerSpec, folder: Path) -> Any:
    """An `AsyncLLM` for a stage's config, ready.

    Raises:
        ConfigError: an argument that vLLM does not have, or a checkpoint whose files are not whole.
        Exception: what vLLM raised.
    """
    config = spec.config
    prepare_environment(config, folder)
    _check_files(config)
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415  (after the environment)
    from vllm.platforms import current_platform  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    if config.device not in {"auto", current_platform.device_type, "rocm" if current_platform.is_rocm() else "auto"}:
        msg = (
            f"device={config.device!r}: the vLLM that is installed ({vllm_version()}) runs on "
            f"{current_platform.device_type}. Nothing was started"
        )
        raise UnsupportedError(msg)
    gone = [name for name in NEEDED if not hasattr(AsyncLLM, name)]
    if gone:
        msg = f"vLLM {vllm_version()} has no AsyncLLM.{gone[0]}, which a stage needs; {TESTED}. Nothing was started"
        raise UnsupportedError(msg)
    try:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(spec)))
    except (TypeError, ValueError) as error:  # pydantic's among them
        msg = f"stage {config.title}: vLLM {vllm_version()} refuses this: {one_line(error)}. Nothing was started"
        raise ConfigError(msg) from error


def _check_files(config: StageConfig) -> None:
    """Whether a model folder's files are whole: vLLM looks last, and does not say which one is not.

    Raises:
        ConfigError: one is not.
    """
    from omni_notebook.models.vllm_folders import check_whole  # noqa: PLC0415  (after the environment)

    try:
        check_whole(Path(config.model), str(config.engine_args.get("load_format", "auto")))
    except ConfigError as error:
        msg = f"stage {config.title}: {error}. Nothing was started"
        raise ConfigError(msg) from error


def one_line(error: BaseException) -> str:
    """What an error says, without what pydantic puts around it."""
    text = re.sub(
        r" \[type=\w+, .*?, input_type=\w+\](?: For further information visit \S+)?", "", " ".join(str(error).split())
    )
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
    if config.engine_args.get("enable_lora"):
        arguments |= {
            "max_loras": config.max_loras,
            "max_lora_rank": _allowed_rank(config.max_lora_rank),
            "max_cpu_loras": max(config.max_loras, ADAPTERS_KEPT),
        }
    if (Path(config.model) / GRAMMAR_FILE).is_file():
        arguments["logits_processors"] = [GRAMMAR]
    if not (Path(config.model) / "tokenizer_config.json").exists() and Path(config.model).is_dir():
        arguments["skip_tokenizer_init"] = True
    arguments.update(copy.deepcopy(config.engine_args))  # vLLM writes into what it is given
    return arguments


def _allowed_rank(rank: int) -> int:
    """The least rank that vLLM knows and that is not below `rank`."""
    return next((one for one in (8, 16, 32, 64, 128, 256, 320, 512) if one >= rank), rank)


def makes_weights_up(llm: Any) -> bool:
    """Whether the weights come from no file."""
    return str(llm.vllm_config.load_config.load_format) == "dummy"


def folder_of(llm: Any) -> Path:
    """The folder of the checkpoint that vLLM has loaded."""
    from omni_notebook.models import vllm_folders  # noqa: PLC0415  (after the environment, which torch reads too)

    config = llm.vllm_config
    cache = config.load_config.download_dir
    return vllm_folders.folder_of(config.model_config.model, revision=config.model_config.revision, cache=cache)


def _adapter(request: LoRARequest | None) -> Any:
    if request is None:
        return None
    from vllm.lora.request import LoRARequest as VllmLoRARequest  # noqa: PLC0415

    return VllmLoRARequest(request.lora_name, request.lora_int_id, request.lora_path)


def generate(llm: Any, request: TextRequest) -> AsyncIterator[Any]:
    """VLLM's outputs of one request, each with what is new since the last."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams  # noqa: PLC0415

    params = SamplingParams(
        max_tokens=request.max_tokens - len(request.generated),
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        stop_token_ids=list(request.stop_token_ids),
        extra_args={GENERATED: len(request.generated)} if request.generated else None,
        output_kind=RequestOutputKind.DELTA,
    )
    prompt: Any = request.prompt
    if not isinstance(prompt, str):
        # with its type it is an input as vLLM's renderer makes one: nothing to tokenize, no thread to wait for
        prompt = {"type": "token", "prompt_token_ids": [*prompt, *request.generated]}
    outputs: AsyncIterator[Any] = llm.generate(prompt, params, request.request_id, lora_request=_adapter(request.lora))
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
        prompt_token_ids=tuple(output.prompt_token_ids or ()) if first and isinstance(request.prompt, str) else None,
        cached_tokens=output.num_cached_tokens if first else None,
    )
