"""The memory cockpit for multi-stage generation in Jupyter.

Importing this loads nothing heavy: every name below is fetched from its module when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from omni_notebook import errors
    from omni_notebook.config import PipelineConfig, StageConfig
    from omni_notebook.engine.async_omni import AsyncOmni
    from omni_notebook.engine.history import history
    from omni_notebook.engine.remote.client import RemoteOmni
    from omni_notebook.engine.upstream.engine import UpstreamOmni
    from omni_notebook.notebook.charts import plot_reclaimed
    from omni_notebook.notebook.dashboard import dashboard, plot_timeline
    from omni_notebook.protocol import LoRARequest, OmniACK, OmniRequestOutput, OmniSamplingParams
    from omni_notebook.server.beside import serve
    from omni_notebook.verbs.auditing.calls import audit, audit_async
    from omni_notebook.verbs.borrowing.lease import borrowed
    from omni_notebook.verbs.session import current, last_acks

    __version__: str

__all__ = [
    "AsyncOmni",
    "LoRARequest",
    "OmniACK",
    "OmniRequestOutput",
    "OmniSamplingParams",
    "PipelineConfig",
    "RemoteOmni",
    "StageConfig",
    "UpstreamOmni",
    "__version__",
    "audit",
    "audit_async",
    "borrowed",
    "current",
    "dashboard",
    "errors",
    "history",
    "last_acks",
    "load_ipython_extension",
    "plot_reclaimed",
    "plot_timeline",
    "serve",
    "unload_ipython_extension",
]

_HOME = {
    "AsyncOmni": "omni_notebook.engine.async_omni",
    "LoRARequest": "omni_notebook.protocol",
    "OmniACK": "omni_notebook.protocol",
    "OmniRequestOutput": "omni_notebook.protocol",
    "OmniSamplingParams": "omni_notebook.protocol",
    "PipelineConfig": "omni_notebook.config",
    "RemoteOmni": "omni_notebook.engine.remote.client",
    "StageConfig": "omni_notebook.config",
    "UpstreamOmni": "omni_notebook.engine.upstream.engine",
    "audit": "omni_notebook.verbs.auditing.calls",
    "audit_async": "omni_notebook.verbs.auditing.calls",
    "borrowed": "omni_notebook.verbs.borrowing.lease",
    "current": "omni_notebook.verbs.session",
    "dashboard": "omni_notebook.notebook.dashboard",
    "history": "omni_notebook.engine.history",
    "last_acks": "omni_notebook.verbs.session",
    "plot_reclaimed": "omni_notebook.notebook.charts",
    "plot_timeline": "omni_notebook.notebook.dashboard",
    "serve": "omni_notebook.server.beside",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    elif name == "errors":
        value = import_module("omni_notebook.errors")
    elif name == "__version__":
        value = _version()
    else:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    globals()[name] = value
    return value


def _version() -> str:
    metadata = import_module("importlib.metadata")
    try:
        return str(metadata.version("omni-notebook"))
    except metadata.PackageNotFoundError:  # a checkout on the path, not installed
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Give a notebook `%omni` and `%%omni`; what `%load_ext omni_notebook` calls."""
    from omni_notebook.notebook.extension import load_ipython_extension as load  # noqa: PLC0415  (light import)

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Take the magics away; a running engine goes on (`%omni stop` ends it). What `%unload_ext omni_notebook` calls."""
    from omni_notebook.notebook.extension import unload_ipython_extension as unload  # noqa: PLC0415  (light import)

    unload(shell)
