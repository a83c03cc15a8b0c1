"""The user's own code, run by a verb in the user's namespace: an error is rendered when it happens and shown later."""

from __future__ import annotations

import ast
import asyncio
import functools
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from omni_notebook.errors import ArgumentError
from omni_notebook.verbs.frontend import drop_frames

if TYPE_CHECKING:
    from collections.abc import Iterator

    from IPython.core.interactiveshell import InteractiveShell

_NOTHING = "nothing was changed"


def check(shell: InteractiveShell, source: str) -> None:
    """Compile a cell as IPython does.

    Raises:
        ArgumentError: it is no Python, or it awaits, and the kernel's event loop is busy with the cell that would wait.
    """
    try:
        code = shell.transform_cell(source)  # type: ignore[no-untyped-call]
        compile(code, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError as error:
        msg = f"the cell is no Python: {error.msg} in its line {error.lineno}: {(error.text or '').strip()}; {_NOTHING}"
        raise ArgumentError(msg) from None
    if _in_a_loop() and shell.should_run_async(source, transformed_cell=code):
        msg = (
            "a cell that awaits can not be run from a magic: write `async with omni_notebook.borrowed(...):` in a "
            f"plain cell; {_NOTHING}"
        )
        raise ArgumentError(msg)


def run(shell: InteractiveShell, source: str) -> BaseException | None:
    """Run a cell; what it raised, with its traceback rendered and its frames let go."""
    before = shell.custom_exceptions, shell.CustomTB
    shell.set_custom_exc((BaseException,), _render_for_later)  # type: ignore[no-untyped-call]
    try:
        with _exits_unseen(shell):
            result = shell.run_cell(source, store_history=False)  # type: ignore[no-untyped-call]
    finally:
        shell.custom_exceptions, shell.CustomTB = before
    error: BaseException | None = result.error_in_exec
    drop_frames(error)
    return None if error is None else error.with_traceback(None)


@contextmanager
def _exits_unseen(shell: InteractiveShell) -> Iterator[None]:
    """IPython shows a SystemExit whatever handler is set; here it is shown once, when it is raised again."""
    show, before = shell.showtraceback, vars(shell).get("showtraceback")

    def unless_it_exits(*args: Any, **known: Any) -> None:
        if not isinstance(sys.exc_info()[1], SystemExit):
            show(*args, **known)

    vars(shell)["showtraceback"] = unless_it_exits
    try:
        yield
    finally:
        vars(shell).pop("showtraceback")
        if before is not None:
            vars(shell)["showtraceback"] = before


def rendered(error: BaseException) -> str:
    """The traceback of an error that `run` returned."""
    render = getattr(error, "_render_traceback_", None)
    lines: list[str] = render() if render is not None else [repr(error)]
    return "\n".join(lines) + "\n"


def variables(shell: InteractiveShell) -> dict[str, Any]:
    """The user's variables, and the outputs that IPython keeps in `Out`."""
    hidden = set(shell.user_ns_hidden) - {"Out"}
    return {name: value for name, value in shell.user_ns.items() if name[0] != "_" and name not in hidden}


def _render_for_later(
    shell: InteractiveShell, kind: type[BaseException], error: BaseException, trace: Any, tb_offset: int | None = None
) -> list[str]:
    """IPython's handler of errors in a cell that a verb runs: render the traceback, show nothing."""
    if not hasattr(error, "_render_traceback_"):
        lines = shell.InteractiveTB.structured_traceback(kind, error, trace, tb_offset=tb_offset or 1)
        error.__dict__["_render_traceback_"] = functools.partial(list, lines)
    return []


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
