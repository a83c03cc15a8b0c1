"""Ranks in processes of their own, from `%omni`: eight ACKs, their table, their logs, a rank that dies."""

import os
import signal

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from omni_notebook.verbs import session as sessions


@pytest.fixture(scope="module")
def shell():
    shell = InteractiveShell.instance() if InteractiveShell.initialized() else InteractiveShell()
    shell.run_line_magic("load_ext", "omni_notebook")
    shell.run_line_magic("omni", "start --tp 2 --replicas 2 --ballast 8MiB --replace")
    yield shell
    shell.run_line_magic("omni", "stop")


def test_every_rank_of_every_replica_answers_and_the_table_shows_them(shell):
    acks = shell.run_line_magic("omni", "sleep --level 2")
    assert [(a.stage_id, a.metadata["replica"], a.rank) for a in acks] == [
        (stage, replica, rank) for stage in (0, 1) for replica in (0, 1) for rank in (0, 1)
    ]
    assert len({a.task_id for a in acks}) == 1
    assert len({a.metadata["pid"] for a in acks}) == 8
    assert all(a.ok and a.freed_bytes == a.metadata["expected_bytes"] > 0 for a in acks)
    text = repr(acks)
    assert "8 ranks answered" in text
    assert "replica" in text
    assert "in 8 processes" in text
    shell.run_line_magic("omni", "wake")


def test_status_names_the_ranks(shell):
    status = shell.run_line_magic("omni", "status")
    assert [len(stage.ranks) for stage in status.stages] == [4, 4]
    assert all(rank.alive for stage in status.stages for rank in stage.ranks)


def test_logs_show_a_ranks_lines_and_refuse_unknown_ranks(shell, capsys):
    shell.run_line_magic("omni", "logs 1 --rank 1 --replica 1")
    assert "stage 1" in capsys.readouterr().out
    with pytest.raises(Exception, match="no rank 5"):
        shell.run_line_magic("omni", "logs 1 --rank 5")


def test_a_killed_rank_is_named_and_restart_brings_the_stage_back(shell, capsys):
    status = shell.run_line_magic("omni", "status")
    os.kill(status.stages[1].ranks[3].pid, signal.SIGKILL)
    engine = sessions.current()
    for _ in range(500):
        if engine.status().stages[1].state == "FAILED":
            break
        engine.submit(_tick()).result(5)
    with pytest.raises((UsageError, Exception), match="FAILED"):
        shell.run_line_magic("omni", "sleep 1")
    shell.run_line_magic("omni", "restart 1")
    assert "AWAKE" in capsys.readouterr().out
    acks = shell.run_line_magic("omni", "sleep 1")
    assert [a.ok for a in acks] == [True] * 4
    shell.run_line_magic("omni", "wake")


async def _tick():
    import asyncio

    await asyncio.sleep(0.01)
