"""`lora`: adapters of the stages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omni_notebook.errors import ArgumentError
from omni_notebook.paths import expanded
from omni_notebook.protocol import LoRARequest
from omni_notebook.verbs.parsing import LORA, VerbParser, seconds, stages
from omni_notebook.verbs.registry import verb

if TYPE_CHECKING:
    import argparse

    from omni_notebook.protocol import EngineStatus, LoRAStatus
    from omni_notebook.verbs.session import Session

NONE = "there is no adapter; %omni lora add PATH adds one\n"


@verb
class Lora:
    """Add, remove, list or pin LoRA adapters in peft's format; %omni generate --lora NAME uses one.

    add PATH takes a folder with adapter_config.json and adapter_model.safetensors, onto every stage that has its
    layers, or onto --stages. Its memory is part of the stage's and sleeps with it. Of many adapters those that were
    used last are ready in slots (max_loras); pin keeps one there. A stage must be awake, and have no request or be
    paused with keep, for all but list.
    Example: %omni lora add runs/style --name style
    """

    name = "lora"
    gives_orders = True
    python = "await engine.add_lora(LoRARequest('style', 1, path))"

    def prepare_parser(self, parser: VerbParser) -> None:
        """What to do, with which adapter."""
        parser.add_argument("action", choices=("add", "remove", "list", "pin"), help="list also works while paused")
        parser.add_argument("what", nargs="?", metavar=LORA, help="add: the folder; remove, pin: id or name")
        parser.add_argument("--name", metavar="NAME", help="add: what to call it; none = the folder's name")
        parser.add_argument("--id", type=int, dest="lora_id", metavar="N", help="add: its number; none = the next free")
        parser.add_argument(
            "--stages", nargs="+", type=stages, default=[], metavar="STAGE", help="add: only these; they must all fit"
        )
        parser.add_argument("--timeout", type=seconds, metavar="S", help="most seconds to wait")

    def run(self, session: Session, args: argparse.Namespace) -> None:
        """Do it, and say what there is now."""
        _check_words(args)
        if args.action == "add":
            _add(session, args)
        elif args.action != "list":
            _change(session, args)
        session.frontend.write(listing(session.engine.status()))


def _check_words(args: argparse.Namespace) -> None:
    """Refuse words that the action does not take.

    Raises:
        ArgumentError: one is missing or too many.
    """
    takes = args.action != "list"
    if takes != (args.what is not None):
        needs = "a folder" if args.action == "add" else "an adapter's id or name"
        problem = f"needs {needs}" if takes else f"takes no {args.what!r}"
        msg = f"omni lora {args.action} {problem}; nothing was changed (%omni help lora)"
        raise ArgumentError(msg)
    options = {"--name": args.name, "--id": args.lora_id, "--stages": args.stages or None}
    given = [option for option, value in options.items() if value is not None]
    if given and args.action != "add":
        msg = f"omni lora {args.action} takes no {given[0]}, only add does; nothing was changed"
        raise ArgumentError(msg)


def _add(session: Session, args: argparse.Namespace) -> None:
    engine = session.engine
    path = expanded(args.what).resolve() if engine.host is None else Path(args.what)  # a folder of that machine
    known = adapters(engine.status())
    lora_id = args.lora_id if args.lora_id is not None else _next_id(known, path)
    request = LoRARequest(args.name or path.name or str(path), lora_id, str(path))
    picked = session.stage_ids(args.stages) if args.stages else None
    added = session.call(lambda engine: engine.add_lora(request, picked, args.timeout), stages=picked)
    if not added:
        session.frontend.write(f"adapter {request.title} was there already\n")


def _next_id(known: dict[int, LoRAStatus], path: Path) -> int:
    """The number of the adapter from this folder, where it is there already; else the lowest that is free."""
    same = [lora_id for lora_id, lora in known.items() if lora.lora_path == str(path)]
    return same[0] if same else next(i for i in range(1, len(known) + 2) if i not in known)


def _change(session: Session, args: argparse.Namespace) -> None:
    found = find(session.engine.status(), args.what)
    lora_id = found.lora_int_id
    if args.action == "remove":
        removed = session.call(lambda engine: engine.remove_lora(lora_id, args.timeout))
        how = "was removed" if removed else "was not there any more"
        session.frontend.write(f"adapter {found.lora_name!r} (id {lora_id}) {how}\n")
    else:
        session.call(lambda engine: engine.pin_lora(lora_id, args.timeout))


def adapters(status: EngineStatus) -> dict[int, LoRAStatus]:
    """Every adapter by its id, in order."""
    return dict(sorted((lora.lora_int_id, lora) for stage in status.stages for lora in stage.loras))


def find(status: EngineStatus, word: str) -> LoRAStatus:
    """The adapter with this name or id.

    Raises:
        ArgumentError: there is none; names those that there are.
    """
    known = adapters(status)
    for lora in known.values():
        if word in {lora.lora_name, str(lora.lora_int_id)}:
            return lora
    names = ", ".join(f"{lora.lora_int_id} {lora.lora_name}" for lora in known.values())
    msg = f"there is no adapter {word!r}; adapters are: {names or 'none'}; nothing was changed"
    raise ArgumentError(msg)


def listing(status: EngineStatus) -> str:
    """A line an adapter: id, name, stages, rank, pinned, folder."""
    known = adapters(status)
    if not known:
        return NONE
    rows = [("id", "name", "stages", "rank", "pinned", "folder")]
    for lora_id, lora in known.items():
        on = [stage for stage in status.stages if any(one.lora_int_id == lora_id for one in stage.loras)]
        places = ", ".join(f"{stage.stage_id} {stage.name}" for stage in on)
        pinned = "yes" if lora.pinned else "no"
        rows.append((str(lora_id), lora.lora_name, places, str(lora.rank), pinned, lora.lora_path))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines) + "\n"
