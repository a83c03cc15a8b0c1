"""A JupyterLab server of the test's own, and a page of it that runs cells as a person's page does."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import nbformat

CHROMIUM = os.environ.get("OMNI_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
START_S = 90.0
CELL_MS = 60_000
ROOT = Path(__file__).parents[2]


def missing() -> str:
    """What these tests need and is not here; empty if nothing."""
    lacks = [name for name in ("playwright", "jupyterlab") if find_spec(name) is None]
    if CHROMIUM is None:
        lacks.append("Chromium")
    return (
        f"browser tests need {', '.join(lacks)} (pip install '.[browser]'; apt-get install chromium)" if lacks else ""
    )


class Server:
    """`jupyter lab`, or with `app="nbclassic"` the classic notebook, in a folder of its own."""

    def __init__(self, folder: Path, app: str = "lab") -> None:
        self.folder = folder / "notebooks"
        self.folder.mkdir(parents=True)
        self.token = secrets.token_hex(16)
        self.app = app
        self.log = folder / "server.log"
        config = folder / "config"
        (config / "labconfig").mkdir(parents=True)
        silent = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
        (config / "labconfig" / "page_config.json").write_text(json.dumps(silent))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "JUPYTER_CONFIG_DIR": str(config),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        command = [sys.executable, "-m", "jupyter", app, "--no-browser", "--allow-root", f"--port={port}"]
        options = [f"--ServerApp.root_dir={self.folder}", f"--IdentityProvider.token={self.token}"]
        options += ["--ServerApp.ip=127.0.0.1", "--ServerApp.port_retries=0"]
        options += ["--LabApp.expose_app_in_browser=True"] if app == "lab" else []
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *options], stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            with contextlib.suppress(OSError, urllib.error.URLError):
                urllib.request.urlopen(f"{self.url}/api/status?token={self.token}", timeout=2).close()
                return
            time.sleep(0.1)
        text = self.log.read_text(errors="replace")[-3000:]
        self.close()
        raise RuntimeError(f"jupyter {self.app} did not start:\n{text}")

    def close(self) -> None:
        """End the server and its kernels."""
        for number, patience_s in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
            if self._process.poll() is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)

    def notebook(self, name: str, cells: list[str]) -> Path:
        """A notebook file with code cells."""
        made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        path = self.folder / name
        nbformat.write(made, path)
        return path


class Lab:
    """A page of JupyterLab with one notebook open."""

    def __init__(self, page, server: Server) -> None:
        self.page = page
        self.server = server

    def open(self, name: str, cells: list[str], *, kernel: bool = True, theme: str = "light") -> None:
        """Open a notebook; `kernel` waits until one is idle."""
        if not (self.server.folder / name).exists():
            self.server.notebook(name, cells)
        self.page.goto(f"{self.server.url}/lab/tree/{name}?reset&token={self.server.token}")
        self.page.wait_for_function("() => window.jupyterapp?.shell?.currentWidget?.content?.model", timeout=CELL_MS)
        self.theme(theme)
        self.page.evaluate("() => { const s = window.jupyterapp.shell; if (!s.leftCollapsed) s.collapseLeft(); }")
        if kernel:
            self.page.wait_for_function(
                "() => window.jupyterapp.shell.currentWidget.context.sessionContext.session?.kernel?.status === 'idle'",
                timeout=CELL_MS,
            )

    def theme(self, name: str) -> None:
        """JupyterLab's own "light" or "dark"."""
        self.page.evaluate(
            "(theme) => window.jupyterapp.commands.execute('apputils:change-theme', {theme})",
            f"JupyterLab {name.title()}",
        )
        self.page.wait_for_function(
            "(light) => document.body.dataset.jpThemeLight === light", arg=str(name == "light").lower()
        )

    def run(self, code: str, *, wait: bool = True) -> None:
        """Add a cell and run it; `wait` until it has ended."""
        self.page.evaluate(
            """([source, wait]) => {
                const panel = window.jupyterapp.shell.currentWidget, notebook = panel.content;
                const last = notebook.model.sharedModel.cells.length;
                notebook.model.sharedModel.insertCell(last, {cell_type: 'code', source, metadata: {}});
                notebook.activeCellIndex = last;
                const done = window.jupyterapp.commands.execute('notebook:run-cell');
                return wait ? done : null;
            }""",
            [code, wait],
        )

    def output(self) -> str:
        """The text of the last cell's output."""
        return self.page.evaluate(
            "() => [...document.querySelectorAll('.jp-Notebook .jp-OutputArea')].at(-1)?.innerText ?? ''"
        )

    def save(self) -> None:
        """Save the notebook."""
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")

    def shut_down_kernel(self) -> None:
        """End this notebook's kernel."""
        self.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.sessionContext.shutdown()")
