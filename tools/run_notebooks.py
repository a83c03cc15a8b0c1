"""Run notebooks on a real kernel and write them back with their pictures: `python tools/run_notebooks.py [FILE ...]`.

What is written holds no widget state, no timings and no path of this machine. An error in a cell, or such a path in an
output, ends with status 1 and leaves the file as it was.
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
    with private_homes(), tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=TIMEOUT_S,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            record_timing=False,
            coalesce_streams=True,
        )
        client.execute()
    return clean(notebook)


@contextmanager
def private_homes() -> Iterator[None]:
    """Keep the kernel out of the person's own profiles and history."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        os.environ.update({name: f"{home}/{name.lower()}" for name in _HOMES})
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def clean(notebook: Any) -> Any:
    """Take away what only this run knows: widget state, views of widgets, the interpreter's version."""
    notebook.metadata.pop("widgets", None)
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in map(_still, cell.outputs) if output is not None]
    return notebook


def _still(output: Any) -> Any | None:
    """The output without its widget, or None where nothing else is left of it."""
    data = output.get("data")
    if data is None:
        return output
    for kind in [kind for kind in data if kind.startswith(WIDGET)]:
        del data[kind]
    return output if any(str(value).strip() for value in data.values()) else None


def machine_paths(notebook: Any) -> list[str]:
    """Paths of this machine that stand in an output."""
    private = {str(ROOT), str(Path.home()), sys.prefix, tempfile.gettempdir() + os.sep}
    text = json.dumps([cell.get("outputs", []) for cell in notebook.cells])
    return sorted(path for path in private if len(path) > 1 and path in text)


if __name__ == "__main__":
    sys.exit(main())
