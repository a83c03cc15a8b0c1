"""The command line as a person runs it: a process, its exit status, its two streams, and what it leaves."""

from __future__ import annotations

import hashlib
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from PIL import Image

import omni_notebook
from omni_notebook import cli, config
from omni_notebook.cli import demo

COMMAND = [sys.executable, "-m", "omni_notebook"]
MIB = 1024**2
QUICK = ("--ballast", "0", "--steps", "1")
ESCAPE = "\x1b["


def run(*words, cwd, **env):
    done = subprocess.run(
        [*COMMAND, *words], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=100
    )
    assert "Traceback" not in done.stderr
    return done


def mib(text):
    return float(text) * MIB


# --------------------------------------------------------------------------------------------------- demo


@pytest.fixture(scope="module")
def level_2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return folder, run("demo", cwd=folder)


def test_demo_ends_with_0_and_says_that_the_pictures_are_identical(level_2):
    _, done = level_2
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("Identical. The stages gave back 536.0 MiB")


def test_demo_writes_two_identical_pictures_into_its_default_folder(level_2):
    folder, _ = level_2
    paths = [folder / "demo-output" / name for name in (demo.BEFORE, demo.AFTER)]
    pixels = [Image.open(path).convert("RGB").tobytes() for path in paths]
    assert pixels[0] == pixels[1]
    assert len(set(pixels[0])) > 2
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == sorted([demo.BEFORE, demo.AFTER])


def test_demo_shows_the_hash_of_the_pictures_that_it_wrote(level_2):
    folder, done = level_2
    pixels = Image.open(folder / "demo-output" / demo.AFTER).tobytes()
    shown = re.findall(r"([0-9a-f]{16})…", done.stdout)
    assert shown == [hashlib.sha256(pixels).hexdigest()[:16]] * 2


def test_demo_shows_every_ranks_answer_with_its_measured_bytes(level_2):
    _, done = level_2
    rows = re.findall(r"^ \d (\w+) +0 +SUCCESS +([\d.]+) MiB +([\d.]+) MiB / ([\d.]+) MiB", done.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == ["thinker", "painter"]
    assert [row[1] == row[2] == row[3] for row in rows] == [True, True]
    assert all(float(row[1]) > 256 for row in rows)


def test_demo_shows_the_drop_as_another_process_sees_it(level_2):
    _, done = level_2
    before, after, less = re.search(
        r"another one: ([\d.]+) MiB before, ([\d.]+) MiB after, ([\d.]+) MiB less", done.stdout
    ).groups()
    assert abs(mib(before) - mib(after) - mib(less)) < MIB
    assert abs(mib(less) - mib("536")) < 0.05 * mib("536")


def test_demo_shows_the_stages_asleep(level_2):
    _, done = level_2
    assert done.stdout.count("ASLEEP (level 2)") == 2
    assert done.stdout.count("ballast (filler)") == 2


def test_demo_writes_no_colours_into_a_pipe(level_2):
    _, done = level_2
    assert ESCAPE not in done.stdout


def test_demo_at_level_1_with_other_options_writes_where_it_is_told(tmp_path):
    out = tmp_path / "a" / "b"
    words = ("--prompt", "a green square", "--seed", "7", "--level", "1", "--out", str(out))
    done = run("demo", *QUICK, *words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "green square" in done.stdout
    assert "seed 7 · 1 steps" in done.stdout
    assert done.stdout.count("ASLEEP (level 1)") == 2
    assert "ballast" not in done.stdout
    assert sorted(path.name for path in out.iterdir()) == sorted([demo.BEFORE, demo.AFTER])


def test_demo_works_where_the_terminal_knows_ascii_only(tmp_path):
    done = run("demo", *QUICK, cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()


def test_demo_shows_colours_in_a_terminal(tmp_path):
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.Popen([*COMMAND, "demo", *QUICK], cwd=tmp_path, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    shown = b"".join(iter(lambda: _read(ours), b"")).decode()
    os.close(ours)
    assert process.wait(60) == 0
    assert ESCAPE in shown
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert max(len(line) for line in re.split(r"[\r\n]+", plain) if line.lstrip().startswith(("0 ", "stage"))) <= 80
    assert "Identical." in plain


def _read(fd):
    try:
        return os.read(fd, 4096)
    except OSError:  # the other end was closed
        return b""


def test_demo_ends_quietly_when_nobody_reads_on(tmp_path):
    line = f"{sys.executable} -m omni_notebook demo {' '.join(QUICK)} 2>err | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == str(cli.UNREAD)
    assert (tmp_path / "err").read_text(encoding="utf-8") == ""


# ------------------------------------------------------------------------------ demo, when something is wrong


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def meddle(monkeypatch):
    """Change what the demo's verbs do: `meddle(change)`; `change(line)` is called first and returns the line."""
    execute = demo.registry.execute

    def install(change):
        monkeypatch.setattr(
            demo.registry, "execute", lambda session, line, cell=None: execute(session, change(line), cell)
        )

    return install


def test_demo_ends_with_1_when_the_second_picture_is_another_one(here, meddle, capsys):
    woken = []

    def other_seed_after_the_wake(line):
        woken.append(line == "wake")
        return line.replace("--seed 42", "--seed 43") if any(woken) else line

    meddle(other_seed_after_the_wake)
    assert cli.main(["demo", *QUICK]) == 1
    assert "DIFFERENT." in capsys.readouterr().out


def test_demo_ends_with_1_and_shows_the_answer_when_a_rank_can_not_wake(here, meddle, capsys, monkeypatch):
    models = shutil.copytree(config.DEMO_FOLDER, here / "models")
    monkeypatch.setattr(config, "DEMO_FOLDER", models)

    def truncate_before_the_wake(line):
        if line == "wake":
            os.truncate(models / "dit" / "model.safetensors", 1000)
        return line

    meddle(truncate_before_the_wake)
    assert cli.main(["demo", *QUICK]) == 1
    shown = capsys.readouterr()
    assert re.search(r"^ 1 painter +0 +ERROR", shown.out, re.MULTILINE)
    assert "A rank answered ERROR." in shown.out
    assert shown.err == ""


def test_demo_without_its_weights_ends_with_one_line_and_1(here, capsys, monkeypatch):
    models = shutil.copytree(config.DEMO_FOLDER, here / "models")
    (models / "dit" / "model.safetensors").unlink()
    monkeypatch.setattr(config, "DEMO_FOLDER", models)
    assert cli.main(["demo", *QUICK]) == cli.FAILED
    shown = capsys.readouterr()
    assert shown.err.startswith("omni-notebook: ")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--prompt", "  "], "the prompt is empty"),
        (["--seed", "-1"], "seed=-1 is out of range"),
        (["--seed", "x"], "invalid int value: 'x'"),
        (["--steps", "0"], "num_inference_steps=0 is out of range"),
        (["--steps", "100000"], "num_inference_steps=100000 is out of range"),
        (["--level", "3"], "invalid choice: 3"),
        (["--ballast", "much"], "'much' is not a size"),
        (["--ballast", "-5"], "'-5' is not a size"),
        (["--out", "/proc/nothing/here"], "/proc is no folder that can be written"),
        (["--out", __file__], "is no folder that can be written"),
        (["--sed", "4"], "did you mean '--seed'?"),
        (["please"], "unknown argument 'please'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_demo_refuses_bad_input_in_one_line_before_it_starts(here, capsys, words, says):
    assert cli.main(["demo", *words]) == cli.BAD_INPUT
    shown = capsys.readouterr()
    assert says in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert list(here.iterdir()) == []


# ------------------------------------------------------------------------------------------------- Ctrl-C


def interrupted(folder, words, until):
    """Start the demo, wait until `until(process)`, press Ctrl-C; the process, its output, and what it left."""
    (folder / "tmp").mkdir()
    process = subprocess.Popen(
        [*COMMAND, "demo", *words],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder / "tmp")},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(process)
    os.killpg(process.pid, signal.SIGINT)
    pressed = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - pressed < 10
    return process, err


def lines_until(words):
    def read(process):
        while words not in process.stdout.readline():
            assert process.poll() is None

    return read


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "until"),
    [
        ((), lines_until("Start")),
        (("--steps", "1000"), lines_until("red star")),
        (("--level", "1"), lines_until("Sleep")),
        (("--level", "1"), lines_until("Status")),
        (("--level", "2"), lines_until("Wake")),
    ],
    ids=["while it starts", "while it draws", "while it falls asleep", "asleep", "while it wakes"],
)
def test_ctrl_c_ends_the_demo_with_one_line_and_leaves_nothing(tmp_path, words, until):
    process, err = interrupted(tmp_path, words, until)
    assert process.returncode == cli.INTERRUPTED
    assert err == "omni-notebook: interrupted; what was started has been stopped\n"
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []
    assert not (tmp_path / "demo-output").exists()
    assert _left_of(process.pid) == []


def _left_of(session):
    """Processes of a session two seconds after its leader has ended; one that was killed may need a moment to go."""
    left, deadline = [session], time.monotonic() + 2.0
    while left and time.monotonic() < deadline:
        left = [pid for pid in psutil.pids() if _session_of(pid) == session]
        time.sleep(0.05)
    return left


def _session_of(pid):
    try:
        return os.getsid(pid)
    except OSError:
        return None


# -------------------------------------------------------------------------------------------- the rest of it


def test_the_installed_command_and_the_module_are_the_same(tmp_path):
    script = subprocess.run(
        [Path(sys.executable).with_name("omni-notebook"), "--help"], capture_output=True, text=True, check=True
    )
    assert script.stdout == run("--help", cwd=tmp_path).stdout


def test_version_is_the_packages(tmp_path):
    assert run("--version", cwd=tmp_path).stdout == f"omni-notebook {omni_notebook.__version__}\n"


@pytest.mark.parametrize("words", [[], ["--help"], ["demo", "--help"], ["doctor", "--help"]], ids=" ".join)
def test_help_goes_to_stdout_and_ends_with_0(words, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    shown = capsys.readouterr()
    assert left.value.code == 0
    assert shown.out.startswith("usage: omni-notebook")
    assert shown.err == ""


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("dmo", "unknown command 'dmo' (did you mean 'demo'?)"),
        ("docter", "did you mean 'doctor'?"),
        ("zzz", "commands are: demo, serve, doctor"),
        ("--verison", "did you mean '--version'?"),
    ],
)
def test_an_unknown_word_is_one_line_with_a_suggestion_and_2(word, says, capsys):
    assert cli.main([word]) == cli.BAD_INPUT
    shown = capsys.readouterr()
    assert says in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)


def test_the_command_line_loads_nothing_heavy_for_its_help():
    code = (
        "import sys; from omni_notebook.cli import main; main(['nothing']); "
        "print(sorted({'torch', 'rich', 'numpy', 'IPython'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"
