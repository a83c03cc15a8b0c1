"""What tests of the notebooks share: running one on a real kernel, and reading what its cells show."""

from __future__ import annotations

import base64
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
from PIL import Image

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "notebooks"
TOOL = ROOT / "tools" / "run_notebooks.py"


def read(path: Path) -> Any:
    """A notebook from its file."""
    return nbformat.read(path, as_version=4)


def execute_copy(committed: Path, folder: Path, *, seconds: float = 150) -> Any:
    """A copy of a committed notebook, its outputs thrown away, run by the tool that wrote the committed one."""
    path = folder / committed.name
    notebook = read(committed)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(notebook, path)
    done = run_tool(path, seconds=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    return read(path)


def run_tool(path: Path, *, seconds: float = 100) -> subprocess.CompletedProcess[str]:
    """Run one notebook in place; the kernel's threads do not spin, which on a busy machine starves the others."""
    command = [sys.executable, str(TOOL), str(path)]
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    return subprocess.run(
        command, cwd=path.parent, env=environment, capture_output=True, text=True, check=False, timeout=seconds
    )


def cells(notebook: Any) -> dict[str, Any]:
    """`{first line: cell}` of the code cells."""
    return {cell.source.partition("\n")[0]: cell for cell in notebook.cells if cell.cell_type == "code"}


def data(cell: Any, kind: str) -> list[str]:
    """What a cell shows in one MIME type."""
    return [output.data[kind] for output in cell.outputs if kind in output.get("data", {})]


def text(cell: Any) -> str:
    """What a cell printed."""
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def picture(cell: Any) -> Image.Image:
    """The one picture that a cell shows."""
    (png,) = data(cell, "image/png")
    return Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")


def assert_ran_well(notebook: Any) -> None:
    """Every code cell ran, in order, and none failed or warned."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"execute_result", "display_data", "stream"}
    assert {output.name for output in outputs if output.output_type == "stream"} == {"stdout"}
