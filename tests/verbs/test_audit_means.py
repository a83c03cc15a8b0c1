"""What an audit works with: the look from outside, the probe, the small processes, the report's page."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from omni_notebook.memory.base import HostMemory
from omni_notebook.protocol import GIB, MIB
from omni_notebook.verbs.auditing import drawing, outside, report
from omni_notebook.verbs.auditing.child import Child, ChildGoneError
from omni_notebook.verbs.auditing.outside import Outside
from omni_notebook.verbs.auditing.probe import Probe
from omni_notebook.verbs.auditing.record import Finding, ProbeLine, Record, Source, Verdict
from omni_notebook.verbs.auditing.result import AuditResult
from tests.verbs.test_audit_judging import cycle, output, process, rank

HERE = (os.getpid(), "cpu")


# ------------------------------------------------------------------------------------ from outside


@pytest.mark.alone
def test_memory_of_this_process_is_seen_by_another_one():
    with Outside() as looking:
        before = looking.look([HERE])[HERE]
        taken = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(taken)), 1, 64 * MIB)
        during = looking.look([HERE])[HERE]
        assert looking.pid not in {None, os.getpid()}
        assert psutil.Process(looking.pid).ppid() == os.getpid()
    assert before.source == during.source == "smaps"
    assert abs(during.n_bytes - before.n_bytes - 64 * MIB) < MIB
    assert not psutil.pid_exists(looking.pid or -1)


@pytest.mark.alone
def test_pages_of_files_are_not_counted(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * (32 * MIB))
    with Outside() as looking, path.open("rb") as file:
        before = looking.look([HERE])[HERE].n_bytes
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert sum(mapped[place] for place in range(0, 32 * MIB, mmap.PAGESIZE)) > 0
            assert abs(looking.look([HERE])[HERE].n_bytes - before) < MIB


def test_processes_of_others_and_those_that_are_gone_are_not_available():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with Outside() as looking:
        seen = looking.look([(1, "cpu"), (gone.pid, "cpu"), (None, "cpu")])
    assert [one.n_bytes for one in seen.values()] == [None, None, None]
    assert seen[1, "cpu"].why_not == "process 1 does not come from this one"
    assert "is not there" in seen[gone.pid, "cpu"].why_not


def test_cuda_without_a_driver_is_not_available_with_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    seat = (os.getpid(), "cuda:0")
    with Outside() as looking:
        (seen,) = looking.look([seat]).values()
    assert (seen.n_bytes, seen.source) == (None, None)
    assert seen.why_not.startswith("NVML is not available here")


def driver(processes):
    """What `nvidia-ml-py` offers of what is used, with these processes on device 1."""

    def running(handle):
        assert handle == 1
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes]

    return SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetComputeRunningProcesses=running,
    )


def test_cuda_memory_is_what_the_driver_shows_for_the_process(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", driver([(7, GIB), (8, 2 * GIB)]))
    with Outside() as looking:
        assert looking.look([(8, "cuda:1")]) == {(8, "cuda:1"): (2 * GIB, Source.NVML, None)}
        hidden = looking.look([(9, "cuda:1")])[9, "cuda:1"]
    assert "another namespace" in hidden.why_not


@pytest.mark.parametrize(("visible", "device"), [("1", "cuda:0"), ("3,1", "cuda:1"), ("GPU-one", "cuda")])
def test_cuda_devices_are_those_that_the_ranks_may_see(monkeypatch, visible, device):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    library = driver([(8, 2 * GIB)])
    library.nvmlDeviceGetHandleByUUID = {"GPU-one": 1}.get
    monkeypatch.setitem(sys.modules, "pynvml", library)
    with Outside() as looking:
        assert looking.look([(8, device)]) == {(8, device): (2 * GIB, Source.NVML, None)}


def test_a_cuda_device_that_no_rank_can_see_is_not_available_with_the_reason(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setitem(sys.modules, "pynvml", driver([(8, 2 * GIB)]))
    with Outside() as looking:
        assert "CUDA_VISIBLE_DEVICES=1" in looking.look([(8, "cuda:1")])[8, "cuda:1"].why_not


def test_a_look_waits_until_memory_is_steady(monkeypatch):
    looks = iter([0, 9 * MIB, 9 * MIB, 0])
    looking = Outside()
    monkeypatch.setattr(looking, "_once", lambda _seats: {HERE: outside.Seen(next(looks), Source.SMAPS)})
    assert looking.look([HERE])[HERE].n_bytes == 9 * MIB


def test_a_reader_that_was_killed_is_not_available_and_replaced():
    with Outside() as looking:
        looking.look([HERE])
        os.kill(looking.pid, 9)
        seen = looking.look([HERE])[HERE]
        assert seen.source == "smaps", "the next look has a reader again"


# ------------------------------------------------------------------------------------ small processes


def test_a_child_answers_and_ends_with_its_parents_pipe():
    with Child("reader.py") as child:
        assert json.loads(child.ask(str(os.getpid())))[str(os.getpid())]["anonymous"] > MIB
        assert psutil.Process(child.pid).cmdline()[1:3] == ["-I", "-S"]
    assert not psutil.pid_exists(child.pid)
    code = (
        "from omni_notebook.verbs.auditing.child import Child; import os; c = Child('taker.py'); c.ask('4096');"
        "print(c.pid, flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not psutil.pid_exists(int(done.stdout)) or psutil.Process(int(done.stdout)).status() == "zombie"


def test_a_child_that_was_killed_says_how():
    with Child("taker.py") as child:
        os.kill(child.pid, 9)
        with pytest.raises(ChildGoneError, match="was killed by signal 9"):
            child.ask("1")


# ------------------------------------------------------------------------------------------- probe


def room(available=8 * GIB, limit=8 * GIB):
    return lambda: HostMemory(limit_bytes=limit, available_bytes=available)


def test_the_probe_really_takes_and_gives_back():
    resident = []

    def watching():
        resident.extend(child.memory_info().rss for child in psutil.Process().children())
        return HostMemory(limit_bytes=8 * GIB, available_bytes=8 * GIB)

    line = Probe(200 * MIB, threading.Event(), watching).take()
    assert (line.taken, line.taken_bytes, line.outcome) == (True, 200 * MIB, "taken, touched and given back")
    assert max(resident) > 100 * MIB, "steps of 64 MiB are there before the last one"
    assert not psutil.pid_exists(line.pid)


def test_the_probe_is_the_first_that_the_kernel_would_end():
    with Child("taker.py") as child:
        assert child.ask("4096") == "ok"
        with open(f"/proc/{child.pid}/oom_score_adj", encoding="ascii") as file:  # noqa: PTH123  (proc)
            assert file.read().strip() == "1000"


def test_the_probe_does_not_try_what_is_not_there():
    line = Probe(8 * GIB, threading.Event(), room()).take()
    assert (line.taken, line.taken_bytes, line.pid) == (False, 0, None)
    assert line.outcome == "not tried: 7.75 GiB are free beside the reserve that keeps the machine alive"


def test_the_probe_stops_when_memory_runs_short_meanwhile():
    rooms = iter([8 * GIB, 8 * GIB, 8 * GIB, 300 * MIB])
    line = Probe(GIB, threading.Event(), lambda: HostMemory(limit_bytes=8 * GIB, available_bytes=next(rooms))).take()
    assert line.taken_bytes == 128 * MIB
    assert line.outcome.startswith("stopped at 128.0 MiB: someone else took memory")


def test_the_probe_can_be_called_off():
    stop = threading.Event()
    stop.set()
    line = Probe(GIB, stop, room()).take()
    assert line.outcome == "called off at 0 B"


# ------------------------------------------------------------------------------------------ report


def record(**known):
    known = {"verdict": Verdict.PASS, "findings": (), "cycles": (cycle(output=output(same_images=True)),), **known}
    return Record(
        model=known.pop("model", "demo"),
        stages=(),
        level=2,
        prompt=known.pop("prompt", "a red star"),
        seed=42,
        sampling_params={},
        cycles_asked=1,
        started="2026-01-01T00:00:00+00:00",
        elapsed_s=1.0,
        version="1",
        golden=output(),
        sources={},
        rules=(),
        **known,
    )


def test_texts_of_others_are_escaped_everywhere():
    nasty = "<script>alert('1')</script>\"&"
    finding = Finding(severity=Verdict.FAIL, text=nasty, sources=(Source.ACK,))
    bad = rank(sleep_status="ERROR", sleep_error=nasty)
    seen = process(ranks=(nasty,), source=None, why_not=nasty)
    made = record(
        verdict=Verdict.FAIL,
        model=nasty,
        prompt=nasty,
        findings=(finding,),
        cycles=(cycle(ranks=(bad,), processes=(seen, process(ranks=(nasty,))), output=output()),),
    )
    page = report.page(AuditResult(made, {nasty: [b"png"]}))
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 8
    assert not re.search(r'"[^"<>]*<script', page)


def test_the_page_needs_nothing_else():
    page = report.page(AuditResult(record(), {"golden": [b"png"]}))
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    assert "<script" not in page
    assert 'src="data:image/png;base64,cG5n"' in page


def test_a_chart_names_what_it_shows_for_those_who_do_not_see_it():
    svg = drawing.chart([process(), process()])
    assert svg.startswith('<svg role="img" aria-label="process 1: stage 0 · rank 0; first cycle 150.0 MiB before, ')
    assert svg.count("<pattern") == 2, "colours have patterns beside them"


@pytest.mark.parametrize("cycles", [1, 12, 13, 1000])
def test_a_chart_of_many_cycles_stays_small(cycles):
    svg = drawing.chart([process() for _ in range(cycles)])
    assert len(re.findall(r'text-anchor="middle"', svg)) <= 12
    assert len(svg) < 60_000


def test_of_many_processes_the_largest_are_drawn():
    lines = tuple(process(pid=pid, floor=pid * MIB) for pid in range(1, 1025))
    shown = drawing.chosen([cycle(processes=lines)])
    assert [one[0].pid for one in shown] == list(range(1024, 1024 - drawing.MOST_PROCESSES, -1))
    page = report.fragment(AuditResult(record(cycles=(cycle(processes=lines),))))
    assert f"The {drawing.MOST_PROCESSES} largest of 1024 processes." in page
    assert "<summary>1024 rows</summary>" in page


def probed(asked, taken, free, outcome="taken", **known):
    probe = ProbeLine(asked_bytes=asked, taken_bytes=taken, available_bytes=free, pid=1, ms=1.0, outcome=outcome)
    return AuditResult(record(cycles=(cycle(probe=probe, output=output(same_images=True), **known),)))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ((8 * GIB, 8 * GIB, 19 * GIB), "may take 8.00 GiB {} (100.0 MiB from the sleep, the rest was free)."),
        ((64 * MIB, 64 * MIB, 19 * GIB), "may take 64.0 MiB {} (100.0 MiB from the sleep)."),
        (
            (60 * GIB, 0, 19 * GIB, "not tried"),
            "may NOT take 60.00 GiB {}: 19.00 GiB are free, beside a reserve that keeps the machine alive.",
        ),
        (
            (8 * GIB, GIB, 19 * GIB, "stopped at 1.00 GiB: someone took memory"),
            "may NOT take 8.00 GiB {}: stopped at 1.00 GiB: someone took memory.",
        ),
    ],
)
def test_the_first_line_answers_whether_a_trainer_may_start(facts, words):
    result = probed(*facts)
    answer = f"A trainer {words.format('while these stages sleep')} The stages are AWAKE again: sleep them first."
    assert repr(result).splitlines()[0] == answer
    assert f"<strong>{answer}</strong>" in report.page(result)


def test_a_trainer_is_not_told_that_stages_are_awake_which_did_not_wake():
    result = probed(MIB, MIB, GIB, ranks=(rank(wake_status="ERROR"),))
    assert repr(result).splitlines()[0].endswith("Not all stages woke: %omni status.")


def test_an_audit_without_a_probe_says_that_nobody_tried():
    result = AuditResult(record())
    assert repr(result).startswith("audit PASS")
    assert result.reasons[-1] == "whether a trainer may start was not tried: --probe SIZE does"


def test_the_text_says_the_verdict_the_reasons_and_what_was_seen():
    finding = Finding(severity=Verdict.WARN, text="not seen", sources=(Source.STATUS,), cycle=1)
    text = repr(AuditResult(record(verdict=Verdict.WARN, findings=(finding,))))
    assert text.startswith("audit WARN · level 2 · 1 of 1 cycle")
    assert (
        "  WARN: cycle 1: not seen [status]\nseen:\n  asleep: 1 rank freed 100.0 MiB [ack], 100.0 MiB gone, as seen"
        in text
    )
