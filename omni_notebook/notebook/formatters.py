"""How a cell shows types that belong to other layers."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

from omni_notebook.errors import OmniError
from omni_notebook.notebook.history import history_bundle
from omni_notebook.notebook.html import as_html
from omni_notebook.notebook.results import generation_bundle, status_bundle
from omni_notebook.notebook.tables import job_table
from omni_notebook.verbs.jobs import JobList

if TYPE_CHECKING:
    from collections.abc import Callable

    from IPython.core.interactiveshell import InteractiveShell
    from matplotlib.figure import Figure

    from omni_notebook.verbs.auditing.result import AuditResult
    from omni_notebook.verbs.engine_api import Engine
    from omni_notebook.verbs.jobs import Job


def engine_bundle(engine: Engine) -> dict[str, Any]:
    """An engine shows as its status."""
    return status_bundle(engine.status())


def remote_bundle(engine: Engine) -> dict[str, Any]:
    """An engine on a server shows as its status, or as where it is and why nothing more is known."""
    try:
        return engine_bundle(engine)
    except OmniError as error:
        return {"text/plain": f"{engine!r}: {error}"}


def audit_bundle(result: AuditResult) -> dict[str, Any]:
    """An audit shows as its report."""
    from omni_notebook.notebook import audits  # noqa: PLC0415  (loaded when there is one)

    return audits.audit_bundle(result)


def job_bundle(job: Job[Any]) -> dict[str, Any]:
    """A job shows as a table of one."""
    return jobs_bundle(JobList([job]))


def jobs_bundle(jobs: JobList) -> dict[str, Any]:
    """Jobs as a table: number, line, state, and how each stands."""
    return {"text/plain": repr(jobs), "text/html": as_html(job_table(jobs))}


_BY_NAME: dict[tuple[str, str], Callable[[Any], dict[str, Any]]] = {
    ("omni_notebook.protocol", "EngineStatus"): status_bundle,
    ("omni_notebook.engine.async_omni", "AsyncOmni"): engine_bundle,
    ("omni_notebook.engine.remote.client", "RemoteOmni"): remote_bundle,
    ("omni_notebook.engine.upstream.engine", "UpstreamOmni"): engine_bundle,
    ("omni_notebook.engine.history", "History"): history_bundle,
    ("omni_notebook.verbs.generating", "Generation"): generation_bundle,
    ("omni_notebook.verbs.auditing.result", "AuditResult"): audit_bundle,
    ("omni_notebook.verbs.jobs", "Job"): job_bundle,
    ("omni_notebook.verbs.jobs", "JobList"): jobs_bundle,
}


def figure_png(figure: Figure) -> bytes:
    """A matplotlib figure as a picture."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    return buffer.getvalue()


def install(shell: InteractiveShell) -> None:
    """Register them by name, so that nothing is loaded for it; a figure keeps what `%matplotlib` chose for it."""
    for (module, name), bundle in _BY_NAME.items():
        _bundles(shell).for_type_by_name(module, name, bundle)
    pictures = shell.display_formatter.formatters["image/png"]  # type: ignore[union-attr]  # made with the shell
    if _FIGURE not in pictures:
        pictures.for_type_by_name(*_FIGURE.rsplit(".", 1), figure_png)


def remove(shell: InteractiveShell) -> None:
    """Forget them."""
    for module, name in _BY_NAME:
        _bundles(shell).pop(f"{module}.{name}", None)


_FIGURE = "matplotlib.figure.Figure"


def _bundles(shell: InteractiveShell) -> Any:
    return shell.display_formatter.mimebundle_formatter  # type: ignore[union-attr]  # made with the shell
