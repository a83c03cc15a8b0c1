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
    """`jupyter lab`, or with `app="nbclassic"` the classic notebook, in a folder of its own.

    `windowed` lets JupyterLab skip cells that are out of sight, as it does by default.
    """

    def __init__(self, folder: Path, app: str = "lab", *, windowed: bool = False) -> None:
        self.folder = folder / "notebooks"
        self.folder.mkdir(parents=True)
        self.token = secrets.token_hex(16)
        self.app = app
        self.log = folder / "server.log"
        config = folder / "config"
        (config / "labconfig").mkdir(parents=True)
        silent = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
        (config / "labconfig" / "page_config.json").write_text(json.dumps(silent))
        shown = {} if windowed else {"@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"}}
        (config / "labconfig" / "default_setting_overrides.json").write_text(json.dumps(shown))
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
        self.close()
        msg = f"jupyter {self.app} did not start:\n{self.log.read_text(errors='replace')[-3000:]}"
        raise RuntimeError(msg)

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

    def open(self, name: str, cells: list[str] | None = None, *, kernel: bool = True) -> None:
        """Open a notebook, new if there is none of this name; with a kernel, wait until it is idle."""
        if not (self.server.folder / name).exists():
            self.server.notebook(name, cells or [])
        self.page.goto(f"{self.server.url}/lab?reset&token={self.server.token}")
        self.page.wait_for_function("() => window.jupyterapp?.restored !== undefined", timeout=CELL_MS)
        self.page.evaluate(
            """async ([path, start]) => {
                const app = window.jupyterapp;
                await app.restored;
                const kernelPreference = start ? {} : {shouldStart: false, canStart: false, autoStartDefault: false};
                await app.commands.execute('docmanager:open', {path, factory: 'Notebook', kernelPreference});
                if (!app.shell.leftCollapsed) app.shell.collapseLeft();
            }""",
            [name, kernel],
        )
        self.page.wait_for_function(  # the launcher may come later, and then has the focus
            """(name) => {
                const shell = window.jupyterapp.shell;
                const mine = [...shell.widgets('main')].find((widget) => widget.context?.path === name);
                if (mine && shell.currentWidget !== mine) shell.activateById(mine.id);
                return shell.currentWidget?.context?.path === name;
            }""",
            arg=name,
            timeout=CELL_MS,
        )
        self.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.ready")
        if kernel:
            self.until_kernel("idle")

    def theme(self, name: str) -> None:
        """JupyterLab's own "light" or "dark"."""
        self.page.evaluate(
            "(theme) => window.jupyterapp.commands.execute('apputils:change-theme', {theme})",
            f"JupyterLab {name.title()}",
        )
        self.page.wait_for_function(
            "(light) => document.body.dataset.jpThemeLight === light && !document.querySelector('#jupyterlab-splash')",
            arg=str(name == "light").lower(),
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

    def forget(self, kept: int) -> None:
        """Take all cells but the first `kept` away."""
        self.page.evaluate(
            """(kept) => {
                const cells = window.jupyterapp.shell.currentWidget.content.model.sharedModel;
                if (cells.cells.length > kept) cells.deleteCellRange(kept, cells.cells.length);
            }""",
            kept,
        )

    def count(self) -> int:
        """How many cells there are."""
        return self.page.evaluate("() => window.jupyterapp.shell.currentWidget.content.model.sharedModel.cells.length")

    def until_kernel(self, status: str) -> None:
        """Wait until the kernel is "idle" or "busy"."""
        self.page.wait_for_function(
            """(status) => window.jupyterapp.shell.currentWidget.context.sessionContext.session?.kernel?.status
                === status""",
            arg=status,
            timeout=CELL_MS,
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

    # ------------------------------------------------------------------------------- the dashboard

    def card(self, place: int):
        """The card of a stage of the first dashboard."""
        return self.page.locator(".omni-card").nth(place)

    def until_card(self, place: int, words: str, timeout_ms: float = 20_000) -> None:
        """Wait until a card says something."""
        self.page.wait_for_function(
            "([place, words]) => document.querySelectorAll('.omni-card')[place]?.innerText.includes(words)",
            arg=[place, words],
            timeout=timeout_ms,
            polling=20,
        )

    def press(self, place: int, name: str) -> None:
        """Click a button of a card."""
        self.card(place).get_by_role("button", name=name, exact=True).click()
