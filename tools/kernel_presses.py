"""Try presses on several ipykernels: `python tools/kernel_presses.py [VERSION …]`, by default the three that differ.

Each version is installed by pip into a folder of its own that also sees this environment's packages; then
`tests/notebook/test_presses.py` runs against a kernel of it. The exit status is 1 if one of them failed.
"""

from __future__ import annotations

import argparse
import os
import site
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("6.30.*", "7.3.*", "7.*")
TEST = "tests/notebook/test_presses.py"


def python_with(version: str, folder: Path) -> Path:
    """An interpreter that has this `ipykernel` and otherwise what this one has."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "outer.pth").write_text("\n".join([*site.getsitepackages(), str(ROOT)]), encoding="utf-8")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(own)]
    subprocess.run([*command, f"ipykernel=={version}"], check=True)
    return python


def tried(version: str) -> bool:
    """Whether the tests pass with this version."""
    with tempfile.TemporaryDirectory(prefix="omni-kernel-") as folder:
        python = python_with(version, Path(folder))
        found = subprocess.run(
            [python, "-c", "from importlib.metadata import version; print(version('ipykernel'))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        print(f"ipykernel {found}", flush=True)
        environment = {**os.environ, "OMNI_KERNEL_PYTHON": str(python)}
        command = [sys.executable, "-m", "pytest", "-q", TEST]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Try presses on several ipykernels.")
    parser.add_argument("versions", nargs="*", default=VERSIONS, help=f"as pip takes them; default {VERSIONS}")
    results = [tried(version) for version in parser.parse_args().versions]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
