"""How a cell shows types that belong to other layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_notebook.notebook.results import generation_bundle, status_bundle

if TYPE_CHECKING:
    from collections.abc import Callable

    from IPython.core.interactiveshell import InteractiveShell

    from omni_notebook.verbs.engine_api import Engine


def engine_bundle(engine: Engine) -> dict[str, Any]:
    """An engine shows as its status."""
    return status_bundle(engine.status())


_BY_NAME: dict[tuple[str, str], Callable[[Any], dict[str, Any]]] = {
    ("omni_notebook.protocol", "EngineStatus"): status_bundle,
    ("omni_notebook.engine.async_omni", "AsyncOmni"): engine_bundle,
    ("omni_notebook.verbs.generating", "Generation"): generation_bundle,
}


def install(shell: InteractiveShell) -> None:
    """Register them by name, so that nothing is loaded for it."""
    for (module, name), bundle in _BY_NAME.items():
        _bundles(shell).for_type_by_name(module, name, bundle)


def remove(shell: InteractiveShell) -> None:
    """Forget them."""
    for module, name in _BY_NAME:
        _bundles(shell).pop(f"{module}.{name}", None)


def _bundles(shell: InteractiveShell) -> Any:
    return shell.display_formatter.mimebundle_formatter  # type: ignore[union-attr]  # made with the shell
