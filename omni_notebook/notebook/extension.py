"""`%load_ext omni_notebook`: loads what it needs when it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Add `%omni` to a shell; an engine that runs keeps running."""
    from omni_notebook.notebook import magics  # noqa: PLC0415

    magics.install(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Take `%omni` away; an engine that runs keeps running."""
    from omni_notebook.notebook import magics  # noqa: PLC0415

    magics.remove(shell)
