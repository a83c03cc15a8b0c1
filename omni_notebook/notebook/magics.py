"""`%omni` and `%%omni`: one line in, a result or one red line out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.display import display

from omni_notebook.engine import views
from omni_notebook.errors import OmniError, SleepError, WakeError
from omni_notebook.notebook import completion, formatters
from omni_notebook.notebook.dashboard import dashboard
from omni_notebook.notebook.frontend import NotebookFrontend
from omni_notebook.notebook.shortening import shortened
from omni_notebook.verbs.frontend import CellError
from omni_notebook.verbs.interrupts import InterruptedVerb
from omni_notebook.verbs.registry import execute
from omni_notebook.verbs.session import session

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_SHORT = (OmniError, ValueError, KeyboardInterrupt)


@magics_class
class OmniMagics(Magics):
    """The magic; `%omni help` lists its verbs."""

    @line_cell_magic
    def omni(self, line: str, cell: str | None = None) -> object:
        """Carry out a verb: %omni help lists them, %omni alone shows the status."""
        caught: BaseException
        try:
            return execute(session(), line, cell)
        except CellError as failed:
            caught = failed
        except _SHORT as error:
            caught = error
        if isinstance(caught, CellError):
            raise caught.error
        if type(caught) is KeyboardInterrupt:  # it came before the verb began or after it had ended
            caught = InterruptedVerb(f"interrupted; {session().state_now()}")
        # Raised outside the handler: an error raised inside would carry a context that IPython may unfold.
        if isinstance(caught, SleepError | WakeError):
            display(session().acks)  # type: ignore[no-untyped-call]
        raise shortened(caught)


def install(shell: InteractiveShell) -> None:
    """Make the magic, its completion and its tables known to a shell; a second time changes nothing."""
    remove(shell)
    session().frontend = NotebookFrontend(shell)
    shell.register_magics(OmniMagics(shell))
    views.register("dashboard", dashboard)
    completion.install(shell)
    formatters.install(shell)


def remove(shell: InteractiveShell) -> None:
    """Take them away again; the engine keeps running."""
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("omni", None)
    completion.remove(shell)
    formatters.remove(shell)
