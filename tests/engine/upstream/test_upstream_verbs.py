"""`%omni` over an upstream engine: started by its flag, and the verbs that people use."""

from __future__ import annotations

import shlex
import sys
from types import SimpleNamespace

import psutil
import pytest
from IPython.core.formatters import DisplayFormatter

from omni_notebook import units
from omni_notebook.errors import ArgumentError, SleepError, UnsupportedError
from omni_notebook.notebook import formatters
from omni_notebook.notebook.dashboard import parts
from omni_notebook.verbs.auditing.record import Verdict
from omni_notebook.verbs.registry import execute
from omni_notebook.verbs.session import Session
from tests.engine.upstream.upstream_helpers import HELD, MIB, left_after, lies


class Written(list):
    """What a session wrote, as one text."""

    @property
    def text(self) -> str:
        return "".join(self)


@pytest.fixture
def session(package, monkeypatch):
    """A session without an engine; what it starts is stopped, and leaves no process."""
    before = set(psutil.Process().children(recursive=True))
    made = Session()
    made.written = Written()
    monkeypatch.setattr(made.frontend, "write", made.written.append)
    yield made
    if made.running is not None:
        made.running.shutdown()
    assert left_after(before) == set()


START = "start some/model --engine vllm-omni --tp 2 --engine-args " + shlex.quote('{"log_stats": true}')


def test_start_passes_its_options_on_and_tells_what_is_not_measured_by_upstream(session):
    engine = execute(session, START)
    options = engine._core.upstream.options
    assert (options["tensor_parallel_size"], options["log_stats"], options["enable_sleep_mode"]) == (2, True, True)
    assert "freed bytes are measured from outside by smaps" in session.written.text


def test_sleep_status_and_wake(session):
    execute(session, START)
    acks = execute(session, "sleep 1")
    assert [(ack.stage_id, ack.rank) for ack in acks] == [(1, 0), (1, 1)]
    assert all(ack.freed_bytes == pytest.approx(HELD, abs=MIB) for ack in acks)
    status = execute(session, "status")
    assert [(stage.name, stage.runtime, str(stage.state)) for stage in status.stages] == [
        ("thinker", "vllm-omni", "AWAKE"),
        ("dit", "vllm-omni", "ASLEEP"),
    ]
    assert [(stage.host_backup_bytes, stage.ranks[0].tags) for stage in status.stages] == [(None, {})] * 2
    assert all(ack.ok for ack in execute(session, "wake dit"))


def test_a_dashboard_says_what_processes_hold_where_nobody_tells_pools(session):
    engine = execute(session, START)
    stages = engine.status().stages
    held = sum(rank.process_bytes for rank in stages[1].ranks)
    assert held > 2 * HELD
    shown = parts.host(stages)
    assert units.size(held) in shown
    assert "0 B of 0 B" not in shown


def test_level_2_is_one_line_that_names_what_helps(session):
    execute(session, START)
    with pytest.raises(UnsupportedError, match=r"can not wake from level 2.*sleep --level 1"):
        execute(session, "sleep 0 --level 2")


def test_a_lie_shows_as_an_error_with_the_answers_kept(session):
    engine = execute(session, START)
    lies(engine).add("sleep")
    with pytest.raises(SleepError, match="sleep failed: stage 1 rank 0"):
        execute(session, "sleep 1")
    assert [ack.metadata["error_code"] for ack in session.acks] == ["NOT_OBSERVED"] * 2


def test_an_audit_passes_and_its_own_looks_agree_with_the_acks(session):
    execute(session, START)
    result = execute(session, "audit 0 1 --level 1 --prompt 'a red star'")
    assert result.verdict == Verdict.PASS, [finding.text for finding in result.record.findings]
    agreed = [f.text for f in result.record.findings if "by its ACKs" in f.text]
    assert len(agreed) == 6  # three processes, asleep and awake again
    assert any("the same 1 image" in f.text for f in result.record.findings)


def test_an_audit_of_a_liar_fails(session):
    engine = execute(session, START)
    lies(engine).add("sleep")
    result = execute(session, "audit 1 --level 1")
    assert result.verdict == Verdict.FAIL


def test_generate_restart_logs_and_stop(session):
    execute(session, START)
    assert execute(session, "generate --seed 3", "a star").images
    for line, words in (("restart 1", "can not restart"), ("logs 1", "keeps no lines")):
        with pytest.raises(UnsupportedError, match=words):
            execute(session, line)
    execute(session, "stop")
    assert "MiB of stage memory given back" in session.written.text
    assert " 0 B" not in session.written.text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("start --engine vllm-omni", "no demo pipeline"),
        ("start m --engine vllm-omni --ballast 1MiB --executor mp", "--ballast-bytes, --executor"),
    ],
)
def test_a_start_that_can_not_be_is_refused_before_the_engine_that_runs_is_stopped(session, line, words):
    engine = execute(session, START)
    with pytest.raises(ArgumentError, match=words):
        execute(session, f"{line} --replace")
    assert session.running is engine


def test_without_the_package_the_line_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm_omni", None)
    with pytest.raises(UnsupportedError, match=r"vllm_omni is not installed here.*pip install 'vllm-omni==0\.30"):
        execute(Session(), "start some/model --engine vllm-omni")


def test_a_cell_that_ends_with_the_engine_shows_its_status(session):
    engine = execute(session, START)
    formatter = DisplayFormatter()
    formatters.install(SimpleNamespace(display_formatter=formatter))
    shown, _ = formatter.format(engine)
    assert "diffusion · vllm-omni" in shown["text/plain"]
    assert "<table" in shown["text/html"]
