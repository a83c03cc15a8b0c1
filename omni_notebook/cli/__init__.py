"""The command line, `omni-notebook COMMAND`. What a command needs is loaded when it runs."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

import omni_notebook
from omni_notebook.cli import parsing
from omni_notebook.errors import ArgumentError, OmniError
from omni_notebook.verbs.parsing import PROG

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

FAILED, BAD_INPUT = 1, 2
INTERRUPTED, UNREAD = 130, 141  # 128 + SIGINT, 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out one command; the exit status: 0 good, 1 it failed, 2 bad input, 130 interrupted."""
    _let_any_character_through()
    try:
        command, args = parsing.read(sys.argv[1:] if argv is None else argv, omni_notebook.__version__)
        status = _run(command, args)
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
        return UNREAD
    except KeyboardInterrupt:
        return _complain("interrupted; what was started has been stopped", INTERRUPTED)
    except ArgumentError as error:
        return _complain(error, BAD_INPUT)
    except (OmniError, OSError) as error:
        return _complain(error, FAILED)
    return status


def _run(command: str, args: Namespace) -> int:
    if command == "demo":
        from omni_notebook.cli import demo  # noqa: PLC0415  (loaded when used)

        return demo.run(args)
    if command == "serve":
        from omni_notebook.server import command as serving  # noqa: PLC0415  (loaded when used)

        return serving.run(args)
    if command in {"history", "where"}:
        from omni_notebook.cli import history  # noqa: PLC0415  (loaded when used)

        return history.run(args) if command == "history" else history.where(args)
    from omni_notebook.cli import doctor  # noqa: PLC0415  (loaded when used)

    return doctor.run(args)


def _complain(what: object, status: int) -> int:
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.write(f"{PROG}: {' '.join(str(what).split())}\n")
    return status


def _let_any_character_through() -> None:
    """A terminal that lacks a character shows `?` for it instead of ending the command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _forget_stdout() -> None:
    """Whoever read this has seen enough: let the interpreter's last flush go nowhere."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
