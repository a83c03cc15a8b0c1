"""Binder's steps in a clean virtual environment, and how much memory the demo takes there.

Binder builds `binder/environment.yml` with conda: Python and torch from conda-forge, then pip for requirements.txt.
conda can not be run here, so that file itself is not tested: Python is the one that runs the tests, and torch comes by
pip, in the version that constraints.txt pins. The rest is what Binder does, in its order: `pip install -r
requirements.txt` in binder/, postBuild, and each command by start.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DEMO_LIMIT_BYTES = 1_500_000_000
BALLAST_BYTES = 256 * 2**20  # what notebooks/01_quickstart.ipynb takes
DEMO = f"""
import asyncio, json, resource
from pathlib import Path

import torch

import omni_notebook
from omni_notebook import AsyncOmni


async def draw(engine):
    async for out in engine.generate("a red star above a blue circle", sampling_params={{"seed": 42}}):
        if out.images:
            return out.images[0].tobytes()


async def demo():
    async with AsyncOmni(model="demo", enable_sleep_mode=True, ballast_bytes={BALLAST_BYTES}) as engine:
        before = await draw(engine)
        acks = await engine.sleep([0, 1], level=2)
        await engine.wake_up([0, 1])
        return [ack.freed_bytes for ack in acks], before == await draw(engine)


freed, same = asyncio.run(demo())
# Not this process's ru_maxrss: across fork and exec it keeps the peak of the process that started it.
own = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(json.dumps({{
    "freed": freed, "same": same, "peak_bytes": 1024 * (int(own.split()[1]) + children),
    "threads": torch.get_num_threads(), "torch": torch.__version__, "cuda": torch.version.cuda,
    "package": omni_notebook.__file__,
}}))
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


@dataclass(frozen=True)
class Image:
    """A copy of the tracked files, and the environment that Binder's steps made for it."""

    folder: Path
    environment: Path
    said: str
    """What postBuild printed."""

    def started(self, *command, **more):
        """What a command prints that Jupyter's container would run: through binder/start."""
        return run(["bash", "binder/start", *command], self.folder, variables(self.environment) | more)


def variables(environment):
    """As a container has them: nothing of the environment that runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "OMP_"))}
    path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    # Compiling what is installed takes longer than the one run of it.
    return kept | {"PATH": path, "PIP_NO_COMPILE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def run(command, folder, env):
    """The output of a command that must end well."""
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def copy_tracked(folder):
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)


def bring_pip(python, env):
    """The newest pip, as conda brings it; skips where pip reaches no registry (its cache does not count)."""
    asked = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-cache-dir",
        "--retries",
        "1",
        "pip",
    ]
    done = subprocess.run(asked, env=env, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        pytest.skip(f"pip reaches no registry: {done.stderr.strip().splitlines()[-1]}")


def torch_pin(pip, folder, env):
    """constraints.txt's torch; skips where pip would bring the build with GPU libraries, gigabytes of them."""
    (pin,) = [line for line in (folder / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    report = folder.parent / "torch.json"
    run([*pip, "install", "-q", "--dry-run", "--no-deps", "--report", str(report), pin], folder, env)
    (chosen,) = (item["metadata"] for item in json.loads(report.read_text())["install"])
    heavy = [needed for needed in chosen.get("requires_dist", ()) if needed.startswith(("nvidia", "cuda", "triton"))]
    if heavy:
        pytest.skip(f"pip would choose a build of {pin} with GPU libraries: {', '.join(heavy)}")
    return pin


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    top = tmp_path_factory.mktemp("binder")
    folder, environment = top / "repository", top / "venv"
    env = variables(environment)
    python = str(environment / "bin" / "python")
    pip = [python, "-m", "pip"]
    copy_tracked(folder)
    venv.create(environment, symlinks=True)
    bring_pip(python, env)
    run([*pip, "install", "-q", "-c", "constraints.txt", torch_pin(pip, folder, env)], folder, env)
    run([*pip, "install", "-q", "-r", "requirements.txt"], folder / "binder", env)
    said = run(["bash", "binder/postBuild"], folder, env)
    yield Image(folder, environment, said)
    shutil.rmtree(top)


def test_post_build_installs_the_package_and_torch_still_has_its_version(image):
    pin = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    last = image.said.splitlines()[-1].split()
    assert last[0::2] == ["torch", "omni_notebook"]
    assert last[1].partition("+")[0] == pin.partition("==")[2]


def test_the_demo_sleeps_and_wakes_in_less_memory_than_binder_gives(image):
    made = json.loads(image.started("python", "-c", DEMO, CPU_LIMIT="1.5"))
    print(f"the demo's peak resident memory: {made['peak_bytes'] / 1e9:.2f} GB")
    assert Path(made["package"]).is_relative_to(image.folder)
    assert made["cuda"] is None
    assert made["threads"] == 1
    assert made["same"]
    assert len(made["freed"]) == 2
    assert min(made["freed"]) > BALLAST_BYTES
    assert BALLAST_BYTES < made["peak_bytes"] < DEMO_LIMIT_BYTES


def test_jupyterlab_starts_and_a_kernel_runs_the_notebook_of_the_dashboard(image):
    assert image.started("jupyter", "lab", "--version").strip()
    # jupyter's own runner, which comes with JupyterLab; nothing of the test environment.
    image.started("jupyter", "execute", "--output", str(image.folder / "ran.ipynb"), "notebooks/05_dashboard.ipynb")
    ran = json.loads((image.folder / "ran.ipynb").read_text())
    outputs = [output for cell in ran["cells"] for output in cell.get("outputs", [])]
    assert sum(output["output_type"] == "error" for output in outputs) == 1  # the illegal order, see the notebook
    assert any("image/png" in output.get("data", {}) for output in outputs)
