"""The words of the command line; a mistake is an `ArgumentError` of one line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from omni_notebook.errors import ArgumentError
from omni_notebook.verbs.parsing import PROG, CommandParser, did_you_mean, size

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPT, SEED, STEPS, LEVEL, BALLAST, OUT = "a red star above a blue circle", 42, 20, 2, "256MiB", "demo-output"

_ABOUT = "A memory cockpit for multi-stage generation: stages sleep, wake, and say what they gave back."
_DEMO = "Draw a picture, put both stages to sleep, wake them, and draw the same picture again."
_DEMO_END = """\
Writes before-sleep.png and after-wake.png. Exit status: 0 the pictures are identical, 1 they differ or a rank
answered ERROR, 2 bad input, 130 interrupted."""
_DOCTOR = "Say what this machine can run, what it can not, and why."
_DOCTOR_END = "Exit status: 0 the demo can run here, 1 it can not; the last lines say why."
_HISTORY = "Show what ranks answered to sleeps and wakes, newest first; no engine is started."
_WHERE = "Show where the history is kept: the file, its size and its rows."
_WHERE_END = "Exit status: 0, or 1 if the file can not be used; the last line says why."
_SERVE = "Serve an engine over HTTP until Ctrl-C: sleep, wake, pause, status, events, images, chat."
COMMANDS = {"demo": _DEMO, "serve": _SERVE, "doctor": _DOCTOR, "history": _HISTORY, "where": _WHERE}


def read(argv: Sequence[str], version: str) -> tuple[str, argparse.Namespace]:
    """The command in `argv` and its options.

    Raises:
        ArgumentError: a mistake.
        SystemExit: after `--help` and `--version`, and where there is no command.
    """
    parser = _top(version)
    if not argv or argv[0].startswith("-"):
        parser.parse_args(argv)
        parser.print_help()
        raise SystemExit(0)
    command, *rest = argv
    if command not in COMMANDS:
        msg = f"unknown command {command!r}{did_you_mean(command, COMMANDS)}; commands are: {', '.join(COMMANDS)}"
        raise ArgumentError(msg)
    make = {"demo": _demo, "serve": _serve, "doctor": _doctor, "history": _history, "where": _where}[command]
    return command, make().parse_args(rest)


def _top(version: str) -> CommandParser:
    commands = "\n".join(f"  {name:<8}{about}" for name, about in COMMANDS.items())
    parser = CommandParser(
        prog=PROG,
        usage=f"{PROG} [--help] [--version] COMMAND [OPTION ...]",
        description=f"{_ABOUT}\n\ncommands:\n{commands}",
        epilog=f"{PROG} COMMAND --help explains one. In a notebook: %load_ext omni_notebook, then %omni help.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{PROG} {version}")
    return parser


def _command(name: str, epilog: str) -> CommandParser:
    return CommandParser(
        prog=f"{PROG} {name}",
        description=COMMANDS[name],
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _demo() -> CommandParser:
    parser = _command("demo", _DEMO_END)
    add = parser.add_argument
    add("--prompt", default=PROMPT, metavar="TEXT", help=f"what to draw ({PROMPT!r})")
    add("--seed", type=int, default=SEED, metavar="N", help=f"same seed, same picture ({SEED})")
    add("--steps", type=int, default=STEPS, metavar="N", help=f"denoise steps; time grows with them ({STEPS})")
    add("--level", type=int, choices=(1, 2), default=LEVEL, help=f"1 keeps a host copy, 2 none ({LEVEL})")
    add(
        "--ballast",
        type=size,
        default=BALLAST,
        metavar="SIZE",
        help=f"a real extra tensor a stage that makes the drop visible; costs that much memory ({BALLAST})",
    )
    add("--out", type=Path, default=Path(OUT), metavar="DIR", help=f"folder for the pictures (./{OUT})")
    return parser


def _doctor() -> CommandParser:
    parser = _command("doctor", _DOCTOR_END)
    parser.add_argument("--json", action="store_true", help="the same facts as JSON")
    return parser


def _serve() -> CommandParser:
    from omni_notebook.server.words import serve_parser  # noqa: PLC0415  (loaded when used)

    return serve_parser(f"{PROG} serve", _SERVE)


def _history() -> CommandParser:
    from omni_notebook.verbs.history import add_wishes, number  # noqa: PLC0415  (loaded when used)

    parser = _command("history", "Files get what is shown; with --limit all everything that matches.")
    parser.add_argument("--stage", type=number, metavar="S", help="only this stage's")
    add_wishes(parser)
    return parser


def _where() -> CommandParser:
    return _command("where", _WHERE_END)
