"""`omni-notebook doctor`: what it says of this machine, and of machines where something is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import omni_notebook
from omni_notebook import cli
from omni_notebook.cli import facts, screen
from omni_notebook.memory.base import HostMemory

MIB = 1024**2


def run(*words, cwd, **env):
    command = [sys.executable, "-m", "omni_notebook", *words]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=100
    )


def test_doctor_ends_with_0_where_the_demo_runs_and_lists_what_does_not(tmp_path):
    done = run("doctor", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "The demo can run here: omni-notebook demo"
    for name in ("cpu", "cuda", "rocm", "xpu", "npu", "torch", "vllm", "diffusers", "uni", "mp", "ray"):
        assert re.search(rf"^  [✓–]  {name} +\S", done.stdout, re.MULTILINE), name
    assert "\x1b[" not in done.stdout


def test_doctor_gives_json(tmp_path):
    done = run("doctor", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert found["demo"] == {"can_run": True, "reasons": []}
    assert found["version"] == omni_notebook.__version__
    assert set(found["packages"]) == {*facts.NEEDED, *facts.FOR_NOTEBOOKS}
    assert 0 < found["memory"]["available_bytes"] <= found["memory"]["limit_bytes"] <= found["memory"]["machine_bytes"]
    supported = {one["name"]: one["supported"] for one in found["platforms"]}
    assert supported == {"cpu": True, "cuda": False, "rocm": False, "xpu": False, "npu": False}
    untried = {one["name"] for one in found["platforms"] if one["reason"].endswith("; not run on hardware")}
    assert untried == {"rocm", "xpu", "npu"}


def test_doctor_does_not_load_torch_itself():
    code = (
        "import sys; from omni_notebook.cli import main; status = main(['doctor', '--json']); "
        "sys.exit(status or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


@pytest.fixture
def without_torch(tmp_path):
    """An environment that has every package but torch."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith("torch"):
            (packages / path.name).symlink_to(path)
    return {"PYTHONPATH": os.pathsep.join([str(Path(omni_notebook.__file__).parents[1]), str(packages)])}


def run_without_site(*words, cwd, env):
    command = [sys.executable, "-S", "-m", "omni_notebook", *words]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=60
    )


def test_doctor_without_torch_says_so_and_ends_with_1(tmp_path, without_torch):
    done = run_without_site("doctor", cwd=tmp_path, env=without_torch)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[-1] == "The demo can not run: torch is not installed: pip install torch"
    assert re.search(r"^  ✗  torch +not installed *$", done.stdout, re.MULTILINE)


def test_doctor_gives_json_without_torch(tmp_path, without_torch):
    done = run_without_site("doctor", "--json", cwd=tmp_path, env=without_torch)
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert found["packages"]["torch"] is None
    assert found["demo"]["reasons"] == ["torch is not installed: pip install torch"]


def test_doctor_says_why_a_broken_torch_does_not_load(tmp_path):
    broken = tmp_path / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libtorch_cpu.so: wrong ELF class')\n", encoding="utf-8")
    done = run("doctor", cwd=tmp_path, PYTHONPATH=str(broken.parent))
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].endswith("ImportError: libtorch_cpu.so: wrong ELF class")


def test_doctor_survives_a_torch_that_kills_its_process(tmp_path):
    broken = tmp_path / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGILL)\n", encoding="utf-8")
    done = run("doctor", cwd=tmp_path, PYTHONPATH=str(broken.parent))
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "The demo can not run: torch does not load (status -4)"


@pytest.fixture
def no_probe(monkeypatch):
    monkeypatch.setattr(facts, "_run_probe", lambda: facts.Probe(built_for="CPU", gpus=0, threads=1, platforms=[]))


def test_doctor_says_when_memory_would_not_suffice(no_probe, monkeypatch, capsys):
    monkeypatch.setattr(facts.host, "host_memory", lambda: HostMemory(limit_bytes=800 * MIB, available_bytes=500 * MIB))
    assert cli.main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "0.49 GiB of memory are free and it takes about 1.00 GiB" in shown
    assert "500.0 MiB free of 800.0 MiB (a cgroup's limit)" in shown


def test_doctor_says_when_the_spill_folder_can_not_be_written(no_probe, monkeypatch, capsys):
    monkeypatch.setattr(facts.tempfile, "tempdir", "/proc")
    assert cli.main(["doctor"]) == 1
    assert "/proc can not be written: set TMPDIR to a folder that can" in capsys.readouterr().out


def test_doctor_says_when_the_demos_weights_are_missing(no_probe, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(facts, "DEMO_FOLDER", tmp_path)
    assert cli.main(["doctor"]) == 1
    assert f"the demo's weights are not in {tmp_path}" in " ".join(capsys.readouterr().out.split())


def test_what_stands_in_brackets_is_shown(capsys):
    table = screen.plain_grid()
    table.add_row("–", "diffusers", "pip install 'omni-notebook[diffusers]'")
    screen.console().print(table)
    screen.console().print("[server]")
    assert capsys.readouterr().out.splitlines() == [
        "–  diffusers      pip install 'omni-notebook[diffusers]'",
        "[server]",
    ]
