"""The state that things are in, and the call that helps, in words; the engine's Python calls as verbs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from omni_notebook.engine.upstream.stage import RUNTIME as UPSTREAM
from omni_notebook.errors import OmniError
from omni_notebook.protocol import EngineStatus, MemoryState, PauseState, StageStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

MOVING = frozenset({MemoryState.FALLING_ASLEEP, MemoryState.WAKING})
NEW_REQUESTS = "%omni generate refuses at once; engine.generate() waits up to 60 s (admission_timeout)"
"""What happens to a new request while a stage is paused."""
LAST_ACKS = "omni_notebook.last_acks()"
NO_RESTART = "vllm_omni can not restart a stage, start the engine anew"

_MEMORY_CALLS = {
    MemoryState.FALLING_ASLEEP: "%omni status shows when it has ended",
    MemoryState.WAKING: "%omni status shows when it has ended",
    MemoryState.ASLEEP: "%omni wake {id} wakes it",
    MemoryState.PARTLY_AWAKE: "%omni wake {id} wakes the rest",
    MemoryState.NEEDS_WEIGHTS: "%omni wake {id} reloads the checkpoint, %omni weights {id} FOLDER takes another",
    MemoryState.FAILED: "%omni restart {id} brings it back",
}
_NO_CHECKPOINT = "%omni weights {id} FOLDER loads some"
_PAUSE_CALLS = {
    PauseState.PAUSING: "%omni status shows when it has ended",
    PauseState.PAUSED: "%omni resume {id} opens it",
    PauseState.PAUSE_FAILED: "pause it again, or %omni resume {id} opens it",
}
_GOALS = {"sleep": MemoryState.ASLEEP, "wake": MemoryState.AWAKE}
_WAKES = frozenset({MemoryState.ASLEEP, MemoryState.PARTLY_AWAKE, MemoryState.NEEDS_WEIGHTS})


def is_moving(stage: StageStatus) -> bool:
    """Whether a sleep, a wake or a pause of the stage is on its way."""
    return stage.state in MOVING or stage.pause_state is PauseState.PAUSING


def memory_words(stage: StageStatus) -> str:
    """`ASLEEP (level 2)`, `PARTLY_AWAKE (weights awake)`."""
    if stage.state is MemoryState.ASLEEP and stage.level is not None:
        return f"{stage.state} (level {stage.level})"
    if stage.state is MemoryState.PARTLY_AWAKE:
        return f"{stage.state} ({', '.join(stage.awake_tags) or 'nothing'} awake)"
    return str(stage.state)


def state_words(stage: StageStatus) -> str:
    """`ASLEEP (level 2)`, `AWAKE, PAUSED (keep)`."""
    words = memory_words(stage)
    if stage.pause_state is not PauseState.OPEN:
        words += f", {stage.pause_state}" + (f" ({stage.pause_mode})" if stage.pause_mode else "")
    return words


def call_that_helps(stage: StageStatus) -> str | None:
    """The calls that lead back to AWAKE and OPEN, or None when the stage is there."""
    memory = _NO_CHECKPOINT if is_lost(stage) else _MEMORY_CALLS.get(stage.state)
    if stage.state is MemoryState.FAILED and not can_restart(stage):
        memory = NO_RESTART
    texts = (memory, _PAUSE_CALLS.get(stage.pause_state))
    found = dict.fromkeys(text.format(id=stage.stage_id) for text in texts if text)
    return ", ".join(found) or None


def is_lost(stage: StageStatus) -> bool:
    """Whether it needs weights that no checkpoint gives back."""
    return stage.state is MemoryState.NEEDS_WEIGHTS and not stage.recoverable


def can_restart(stage: StageStatus) -> bool:
    """Whether its engine has a call that makes one stage anew."""
    return stage.runtime != UPSTREAM


def pick(status: EngineStatus, stage_ids: Sequence[int] | None) -> list[StageStatus]:
    """The stages that an order names; None = all. Unknown ids are left to the engine to refuse."""
    return [stage for stage in status.stages if stage_ids is None or stage.stage_id in stage_ids]


def describe(stages: Sequence[StageStatus]) -> str:
    """`stage 0 (thinker) is ASLEEP (level 1): %omni wake 0 wakes it; stage 1 …`; what a pause holds shares a call."""
    held = [stage for stage in stages if stage.state is MemoryState.AWAKE and stage.pause_state is PauseState.PAUSED]
    if len(held) < 2:
        return "; ".join(map(_describe_one, stages))
    others = [_describe_one(stage) for stage in stages if stage not in held]
    opens = f"%omni resume opens {'both' if len(held) == 2 else 'them all'}"
    return "; ".join([*others, *map(named_state, held[:-1]), f"{named_state(held[-1])}: {opens}"])


def _describe_one(stage: StageStatus) -> str:
    call = call_that_helps(stage)
    return f"{named_state(stage)}: {call}" if call else named_state(stage)


def named_state(stage: StageStatus) -> str:
    """`stage 0 (thinker) is ASLEEP (level 1)`."""
    return f"stage {stage.stage_id} ({stage.name}) is {state_words(stage)}"


def closed_gates(status: EngineStatus, *, text_only: bool) -> str | None:
    """Everything that keeps a prompt out, and the lines that open the way; None where nothing does.

    A pause of any stage closes admission; a stage that is not awake only where the prompt's way leads through it.
    """
    route = [stage for stage in status.stages if not text_only or stage.kind == "ar"]
    closed = [
        stage
        for stage in status.stages
        if stage.pause_state is not PauseState.OPEN or (stage in route and stage.state is not MemoryState.AWAKE)
    ]
    if not closed:
        return None
    return f"{'; '.join(map(named_state, closed))}: {', '.join(_lines_that_open(closed))}"


def _lines_that_open(closed: Sequence[StageStatus]) -> list[str]:
    failed = [stage for stage in closed if stage.state is MemoryState.FAILED]
    lines = [f"%omni restart {stage.stage_id}" if can_restart(stage) else NO_RESTART for stage in failed]
    lines += [f"%omni weights {stage.stage_id} FOLDER" for stage in closed if is_lost(stage)]
    asleep = [str(stage.stage_id) for stage in closed if stage.state in _WAKES and not is_lost(stage)]
    if asleep:
        lines.append(f"%omni wake {' '.join(asleep)}")
    if any(stage.pause_state is not PauseState.OPEN for stage in closed):
        lines.append("%omni resume")
    return lines or ["%omni status shows when it has ended"]


# --------------------------------------------------------------------- what an interrupt came to


def outcome(order: str | None, before: Sequence[StageStatus], after: Sequence[StageStatus]) -> str:
    """What became of an interrupted `order`, told by the stages' states; `order` is None where they can not tell."""
    if order is None or any(map(_unclear, after)):
        return "interrupted"
    moved = [new.stage_id for old, new in zip(before, after, strict=False) if _place(old) != _place(new)]
    if not moved:
        there = all(stage.state is _GOALS.get(order) for stage in before)
        return "interrupted; nothing had to change" if there else "interrupted and rolled back"
    if len(moved) == len(after):
        return f"interrupted too late: the {order} ended"
    return f"interrupted half-way: the {order} ended for stage {', '.join(map(str, moved))}, the rest was rolled back"


def _unclear(stage: StageStatus) -> bool:
    failed = stage.state is MemoryState.FAILED or stage.pause_state is PauseState.PAUSE_FAILED
    return failed or is_moving(stage)


def _place(stage: StageStatus) -> tuple[object, ...]:
    return stage.state, stage.level, stage.awake_tags, stage.pause_state


# -------------------------------------------------------------------- Python calls as verbs

_CALLS: tuple[tuple[str, str], ...] = (
    (r"wake_up\(\[([\d, ]+)\]\)", r"%omni wake \1"),
    (r"\bwake(?:_up)?\(reload=False\)", "%omni wake {id} --no-reload"),
    (r"\bwake_up\b(?:\(\))?", "%omni wake {id}"),
    (r"pause_generation\(mode='(\w+)', stage_ids=\[([\d, ]+)\]\)", r"%omni pause \2 --mode \1"),
    (r"\bpause_generation\b(?:\(\))?", "%omni pause {id}"),
    (r"\bresume_generation\b(?:\(\))?", "%omni resume"),
    (r"sleep\(\.\.\., mode='keep' \| 'wait' \| 'abort'\)", "%omni sleep {id} --mode keep (or wait, abort)"),
    (r"sleep\(\.\.\., mode='wait' \| 'abort'\)", "%omni sleep {id} --mode wait (or abort)"),
    (r"sleep\(\.\.\., mode='keep' \| 'abort'\)", "%omni sleep {id} --mode keep (or abort)"),
    (r"sleep\(\.\.\., discard=True\)(?: \(magic: --discard\))?", "%omni sleep {id} --discard"),
    (r"\bsleep\((?:level=)?([12])\)", r"sleep --level \1"),
    (r"\brestart\((\d+)\)", r"%omni restart \1"),
    (r"\bcall shutdown\(\)", "%omni stop"),
    (r"(?<![.\w])load_weights\((\d+), \w+\)", r"%omni weights \1 FOLDER"),
    (r"(?<![.\w])load_weights\(\w+, \w+\)", "%omni weights {stage} FOLDER"),
    (r"(?<=call )load_weights\b(?!\()", "%omni weights {stage} FOLDER"),
    (r"\badd_lora\(request\)", "%omni lora add PATH"),
    (r"\bremove_lora\((\w+)\)", r"%omni lora remove \1"),
    (r"(?<= )\.acks\b", LAST_ACKS),
)
_FLAGS = {
    "num_inference_steps": "--steps",
    "guidance_scale": "--guidance",
    "max_tokens": "--max-tokens",
    "temperature": "--temperature",
    "seed": "--seed",
    "ballast_bytes": "--ballast",
    "spill_dir": "--spill-dir",
    "backup": "--backup",
    "default_timeout": "--default-timeout",
    "tensor_parallel_size": "--tp",
    "num_replicas": "--replicas",
    "max_loras": "--max-loras",
    "max_lora_rank": "--max-lora-rank",
    "executor": "--executor",
    "runtime": "--runtime",
    "step_execution": "--step-execution",
    "timeout": "--timeout",
}
_GIVEN = re.compile(rf"(?<![\w-])({'|'.join(_FLAGS)})=")
_NAMED = re.compile(rf"(?<![\w.-])({'|'.join(name for name in _FLAGS if '_' in name)})\b")
_STAGE = re.compile(r"\bstage (\d+)\b")


def in_verbs(text: str) -> str:
    """A message of the engine with the verbs and flags that do what its Python calls do.

    Option names stay as they are in a message about a pipeline file, whose keys they are.
    """
    named = _STAGE.search(text)
    number = named[1] if named else None
    for pattern, verb in _CALLS:
        line = verb.replace(" {id}", f" {number}" if number else "").replace("{id}", number or "STAGE")
        line = line.replace("{stage}", number or "STAGE")
        text = re.sub(pattern, line, text)
    text = re.sub(r"(%omni \w+ )((?:\d+, )+\d+)", lambda found: found[1] + found[2].replace(",", ""), text)
    if ".yaml" in text or ".yml" in text:
        return text
    text = _GIVEN.sub(lambda found: f"{_FLAGS[found[1]]} ", text)
    return _NAMED.sub(lambda found: _FLAGS[found[1]], text)


def reword(error: BaseException) -> None:
    """Let an error of the engine name verbs from here on."""
    if isinstance(error, OmniError) and error.args and isinstance(error.args[0], str):
        error.args = (in_verbs(error.args[0]), *error.args[1:])
