"""Run notebooks on a real kernel and write them back with their pictures: `python tools/run_notebooks.py [FILE ...]`.

What is written holds no widget state, no timings and no path of this machine; the kernel's home, an empty folder made
for it, stands as `~`. An error in a cell that is not tagged `raises-exception`, or such a path in an output, ends with
status 1 and leaves the file as it was.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
TIMEOUT_S = 300
WIDGET = "application/vnd.jupyter.widget-"
LEDGER = ".local/share/omni-notebook/ledger.db"
_PICTURES = {"text/html", "image/png"}
_HOMES = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")


def main() -> int:
    """Run the notebooks that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="which; all in notebooks/ if none is given")
    failed = [path for path in parser.parse_args().files or sorted(NOTEBOOKS.glob("*.ipynb")) if not renew(path)]
    return 1 if failed else 0


def renew(path: Path) -> bool:
    """Run one notebook and write it back; whether that went well."""
    try:
        notebook = execute(path)
    except CellExecutionError as error:
        print(f"{path.name}: {error}")
        return False
    found = machine_paths(notebook)
    if found:
        print(f"{path.name}: an output names {found[0]}; not written")
        return False
    nbformat.write(notebook, path)  # type: ignore[no-untyped-call]
    print(f"{path.name}: {len(notebook.cells)} cells, {path.stat().st_size / 1024:.0f} KiB")
    return True


def execute(path: Path) -> Any:
    """The notebook with the outputs of a fresh kernel, cleaned.

    Raises:
        CellExecutionError: a cell raised.
    """
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    with private_homes() as home, tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=TIMEOUT_S,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            record_timing=False,
            coalesce_streams=True,
        )
        client.execute()
    return clean(notebook, home)


@contextmanager
def private_homes() -> Iterator[str]:
    """Keep the kernel out of the person's own profiles, history and ledger; the folder that has them instead."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        os.environ.update({name: f"{home}/{name.lower()}" for name in _HOMES})
        os.environ["OMNI_NOTEBOOK_LEDGER"] = f"{home}/{LEDGER}"
        try:
            yield home
        finally:
            os.environ.clear()
            os.environ.update(before)


def clean(notebook: Any, home: str) -> Any:
    """Take away what only this run knows: widgets and their state, the kernel's home, the interpreter's version."""
    notebook.metadata.pop("widgets", None)
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = _homely(_stills(cell.outputs), home)
    return notebook


def _stills(outputs: list[Any]) -> list[Any]:
    """The outputs without widgets; words that only stood for one go where a picture of it stands below."""
    pictures = [not _PICTURES.isdisjoint(output.get("data", {})) for output in outputs]
    kept = []
    for place, output in enumerate(outputs):
        data = output.get("data")
        views = [kind for kind in data or {} if kind.startswith(WIDGET)]
        for kind in views:
            del data[kind]
        pictured = bool(views) and any(pictures[place + 1 :])
        if data is None or (not pictured and any(str(value).strip() for value in data.values())):
            kept.append(output)
    return kept


def _homely(value: Any, home: str) -> Any:
    """The same with `~` where the kernel's home stood."""
    if isinstance(value, str):
        return value.replace(home, "~")
    if isinstance(value, list):
        return [_homely(item, home) for item in value]
    if isinstance(value, dict):
        return type(value)({key: _homely(item, home) for key, item in value.items()})
    return value


def machine_paths(notebook: Any) -> list[str]:
    """Paths of this machine that stand in an output."""
    private = {str(ROOT), str(Path.home()), sys.prefix, tempfile.gettempdir() + os.sep}
    text = json.dumps([cell.get("outputs", []) for cell in notebook.cells])
    return sorted(path for path in private if len(path) > 1 and path in text)


if __name__ == "__main__":
    sys.exit(main())
