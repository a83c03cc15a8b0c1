"""The requests that open what is closed, for whoever reads an error."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from omni_notebook.protocol import MemoryState, PauseState
from omni_notebook.verbs.hints import can_restart, is_lost

if TYPE_CHECKING:
    from omni_notebook.protocol import EngineStatus

_WAKES = frozenset(
    {MemoryState.FALLING_ASLEEP, MemoryState.ASLEEP, MemoryState.PARTLY_AWAKE, MemoryState.NEEDS_WEIGHTS}
)

PREFIX = "/v1/omni"
_CALLS: tuple[tuple[str, str], ...] = (
    (r"\bwake_up\(\[([\d, ]+)\]\)", rf'POST {PREFIX}/wakeup {{"stage_ids": [\1]}}'),
    (r"\bwake(?:_up)?\(reload=False\)", f'POST {PREFIX}/wakeup {{"reload": false}}'),
    (r"\bwake_up\b(?:\(\))?", f"POST {PREFIX}/wakeup"),
    (
        r"\bpause_generation\(mode='(\w+)', stage_ids=\[([\d, ]+)\]\)",
        rf'POST {PREFIX}/pause {{"mode": "\1", "stage_ids": [\2]}}',
    ),
    (r"\bpause_generation\(mode='(\w+)'\)", rf'POST {PREFIX}/pause {{"mode": "\1"}}'),
    (r"\bpause_generation\b(?:\(\))?", f"POST {PREFIX}/pause"),
    (r"\bresume_generation\b(?:\(\))?", f"POST {PREFIX}/resume"),
    (r"\bsleep\(\.\.\., discard=True\)(?: \(magic: --discard\))?", f'POST {PREFIX}/sleep with "discard": true'),
    (r"\bsleep\(\.\.\., mode=((?:'\w+'(?: \| )?)+)\)", rf'POST {PREFIX}/sleep with "mode": \1'),
    (r"\bsleep\((?:level=)?([12])\)", r"sleep at level \1"),
    (r"\brestart\((\d+)\)", rf'POST {PREFIX}/restart {{"stage_id": \1}}'),
    (r"(?<![.\w])load_weights\((\d+), \w+\)", rf'POST {PREFIX}/weights {{"stage_id": \1, "path": "FOLDER"}}'),
    (r"(?<![.\w])load_weights\(\w+, \w+\)", f"POST {PREFIX}/weights"),
    (r"(?<=call )load_weights\b(?!\()", f"POST {PREFIX}/weights"),
    (r"\badd_lora\(request\)", f"POST {PREFIX}/loras"),
    (r"\bremove_lora\((\w+)\)", rf"DELETE {PREFIX}/loras/\1"),
    (r"\bcall shutdown\(\) and start the engine anew", "end the server and start it anew"),
    (r"\babort\(request_id\)", f"POST {PREFIX}/abort"),
    (r"\bcall (?=POST |DELETE )", "send "),
    (r"\bCall (?=POST |DELETE )", "Send "),
    (r" \(admission_timeout\)", " (?wait=SECONDS)"),
    (
        r"the engine was started with enable_sleep_mode=False; start it with True",
        "the server was started without --enable-sleep-mode; start it with that",
    ),
    (r"%omni abort them", f"end them with POST {PREFIX}/abort"),
    (r"%omni status", f"GET {PREFIX}/status"),
    (r"%omni restart (\d+)", rf'POST {PREFIX}/restart {{"stage_id": \1}}'),
    (r"%omni weights (\d+) FOLDER", rf'POST {PREFIX}/weights {{"stage_id": \1, "path": "FOLDER"}}'),
)
_WITH_STAGES = re.compile(r"%omni (wake|resume)\b((?: \d+)*)")
"""An audit speaks of verbs: `%omni wake 0 1`."""


def in_requests(text: str) -> str:
    """A message of the engine with the requests that do what its Python calls do."""
    for pattern, request in _CALLS:
        text = re.sub(pattern, request, text)
    return _WITH_STAGES.sub(_with_stages, text)


def _with_stages(verb: re.Match[str]) -> str:
    order = {"wake": "wakeup"}.get(verb[1], verb[1])
    body = f' {{"stage_ids": [{", ".join(verb[2].split())}]}}' if verb[2] else ""
    return f"POST {PREFIX}/{order}{body}"


def requests_that_help(status: EngineStatus, *, text_only: bool = False) -> list[dict[str, Any]]:
    """`[{"method": "POST", "path": "/v1/omni/wakeup", "body": {"stage_ids": [0]}}]`; empty if all is open.

    `text_only`: the way is that of a chat, which ends with the autoregressive stages.
    """
    stages = [stage for stage in status.stages if stage.kind == "ar" or not text_only]
    failed = [stage for stage in stages if stage.state is MemoryState.FAILED and can_restart(stage)]
    lost = [stage for stage in stages if is_lost(stage)]
    asleep = [stage for stage in stages if stage.state in _WAKES and not is_lost(stage)]
    paused = [stage for stage in status.stages if stage.pause_state is not PauseState.OPEN]
    helping = [_post("restart", {"stage_id": stage.stage_id}) for stage in failed]
    helping += [_post("weights", {"stage_id": stage.stage_id, "path": "FOLDER"}) for stage in lost]
    if asleep:
        helping.append(_post("wakeup", {"stage_ids": [stage.stage_id for stage in asleep]}))
    if paused:
        helping.append(_post("resume", {}))
    return helping


def _post(order: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"method": "POST", "path": f"{PREFIX}/{order}", "body": body}
