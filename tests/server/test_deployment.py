"""The files in deploy/: their command lines are this program's, and what they copy is there."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path

import pytest

from omni_notebook.server import words
from omni_notebook.server.settings import ServerSettings

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "omni-notebook.service"
CONTAINER = ROOT / "deploy" / "Containerfile"


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]  (systemd's names have capitals)
    parser.read_string(UNIT.read_text(encoding="utf-8"))
    return parser["Service"]


def container(instruction: str) -> str:
    text = CONTAINER.read_text(encoding="utf-8").replace("\\\n", " ")
    (found,) = re.findall(rf"^{instruction} (.*)$", text, re.MULTILINE)
    return str(found)


def by_container() -> list[str]:
    return [*json.loads(container("ENTRYPOINT")), *json.loads(container("CMD"))]


@pytest.mark.parametrize("command", [shlex.split(unit()["ExecStart"]), by_container()], ids=["systemd", "container"])
def test_the_command_line_is_one_that_the_server_takes(command: list[str]) -> None:
    program, verb, *rest = command
    assert (Path(program).name, verb) == ("omni-notebook", "serve")
    args = words.serve_parser("omni-notebook serve", "").parse_args(rest)
    assert words.model_of(args) == "demo"
    assert args.enable_sleep_mode
    ServerSettings(host=args.host, port=args.port, api_key="key")


def test_the_unit_takes_the_key_from_the_variable_that_the_server_reads() -> None:
    text = UNIT.read_text(encoding="utf-8")
    assert f"{words.KEY_VARIABLE}=" in text
    assert unit()["EnvironmentFile"] == "/etc/omni-notebook.env"


def test_systemd_ends_it_with_a_signal_that_lets_requests_finish() -> None:
    from omni_notebook.server.serving import GRACE_S

    assert int(unit()["TimeoutStopSec"]) > 2 * GRACE_S
    assert unit()["KillMode"] == "mixed"
    assert container("STOPSIGNAL") == "SIGTERM"


def test_what_the_container_file_copies_is_there() -> None:
    text = CONTAINER.read_text(encoding="utf-8")
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for name in line.split()]
    assert copied
    assert [name for name in copied if not (ROOT / name).exists()] == []
    extra = re.search(r"pip install --no-cache-dir \"\.\[(\w+)\]\"", text)
    assert extra is not None
    assert f"\n{extra[1]} = [" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
