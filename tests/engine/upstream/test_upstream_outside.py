"""Looks from outside: NVML a process, and what is said where it does not tell."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from omni_notebook.engine import tracing
from omni_notebook.engine.upstream.outside import Outside
from omni_notebook.errors import SleepError
from tests.engine.engine_helpers import collect
from tests.engine.upstream.upstream_helpers import HELD, MIB, started

HERE = os.getpid()


class Nvml:
    """NVML's functions over a table `{device: {pid: bytes}}`; `real` looks the bytes up in the processes themselves."""

    class NVMLError(Exception):
        """A driver's error."""

    def __init__(self, devices, *, real=False, used=()):
        self.used = iter(used)
        self.devices = devices
        self.real = real
        self.open = 0

    def nvmlInit(self):  # noqa: N802  (NVML's name)
        self.open += 1

    def nvmlShutdown(self):  # noqa: N802  (NVML's name)
        self.open -= 1

    def nvmlDeviceGetCount(self):  # noqa: N802  (NVML's name)
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802  (NVML's name)
        return index

    def nvmlDeviceGetName(self, handle):  # noqa: N802  (NVML's name)
        return f"Test GPU {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802  (NVML's name)
        return SimpleNamespace(used=next(self.used, 0))

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802  (NVML's name)
        held = self.devices[handle]
        if self.real:
            pids = [one.pid for one in psutil.Process().children(recursive=True)]
            held = {pid: 4 * MIB + Outside("cpu").glance([pid])[pid].n_bytes for pid in pids}
        return [SimpleNamespace(pid=pid, usedGpuMemory=n_bytes) for pid, n_bytes in held.items()]


@pytest.fixture
def nvml(monkeypatch):
    """Puts a table in the library's place."""

    def put(devices, **known):
        library = Nvml(devices, **known)
        monkeypatch.setitem(sys.modules, "pynvml", library)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return library

    return put


def test_a_process_on_two_devices_holds_their_sum_and_is_on_the_one_with_more(nvml):
    library = nvml([{HERE: 5 * MIB, 77: MIB}, {HERE: 9 * MIB}])
    outside = Outside("cuda")
    assert outside.look([HERE])[HERE][:2] == (14 * MIB, "cuda:1")
    assert outside.name("cuda:1") == "Test GPU 1"
    assert outside.holders([HERE, 77, 78]) == {HERE, 77}
    outside.close()
    assert library.open == 0


@pytest.mark.parametrize(
    ("devices", "words"),
    [([{4242: MIB}], "those of another namespace"), ([{HERE: None}], "does not tell the bytes")],
)
def test_hidden_process_ids_and_bytes_are_null_with_the_reason(nvml, devices, words):
    nvml(devices)
    seen = Outside("cuda").look([HERE])[HERE]
    assert (seen.n_bytes, seen.gone) == (None, False)
    assert words in seen.why_not


def test_without_the_library_nothing_is_measured_and_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    seen = Outside("cuda").look([HERE])[HERE]
    assert seen.n_bytes is None
    assert seen.why_not.startswith("NVML: ")


@pytest.mark.parametrize("reaped", [True, False], ids=["reaped", "zombie"])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_process_that_has_ended_is_gone(nvml, device_type, reaped):
    nvml([{}])
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | (0 if reaped else os.WNOWAIT))
    seen = Outside(device_type).look([ended.pid])[ended.pid]
    ended.wait()
    assert (seen.n_bytes, seen.gone) == (None, True)
    assert seen.why_not == f"process {ended.pid} has ended"


def on_gpu(monkeypatch):
    """The stand-in's ranks say that they are on a GPU."""
    from vllm_omni import platforms

    monkeypatch.setattr(platforms.current_omni_platform, "device_type", "cuda", raising=False)


def test_ranks_on_a_gpu_are_measured_by_nvml_a_process_and_named_by_its_device(package, monkeypatch, nvml):
    on_gpu(monkeypatch)
    nvml([{}], real=True)
    big = 96 * MIB
    with started(tensor_parallel_size=2, fake_bytes=big) as engine:
        acks = asyncio.run(engine.sleep())
        assert [ack.freed_bytes for ack in acks] == [pytest.approx(big, abs=MIB)] * 3
        assert {ack.metadata["device"] for ack in acks} == {"cuda:0"}
        assert acks[0].metadata["source"] == "Platform_Test_GPU_0"
        assert acks[0].metadata["note"].startswith("measured from outside by NVML per process; upstream ")


def test_where_process_ids_are_hidden_no_byte_is_taken_from_upstreams_word(package, monkeypatch, nvml):
    on_gpu(monkeypatch)
    nvml([{1: MIB}], used=(100 * MIB, 40 * MIB, 40 * MIB))
    with started(tensor_parallel_size=2) as engine:
        with pytest.raises(SleepError, match="another namespace") as raised:
            asyncio.run(engine.sleep([1]))
        for ack in raised.value.acks:
            assert (ack.freed_bytes, ack.metadata["observed_bytes"], ack.metadata["observed_scope"]) == (0, None, None)
            assert ack.metadata["error_code"] == "NOT_OBSERVED"
            assert "all holders together have 60.0 MiB fewer on the devices than before" in ack.metadata["note"]
            assert f"upstream said 48.0 MiB ({2 * HELD} bytes)" in ack.metadata["note"]
        assert str(engine.status().stages[1].state) == "ASLEEP"
        woken = asyncio.run(engine.wake_up([1]))
        assert [(ack.status, ack.metadata["mapped_bytes"]) for ack in woken] == [("SUCCESS", None)] * 2
        assert asyncio.run(collect(engine))[-1].images


def test_a_drop_below_the_noise_of_a_gpu_is_not_observed(package, monkeypatch, nvml):
    on_gpu(monkeypatch)
    nvml([{}], real=True)
    with started() as engine:
        (ack,) = asyncio.run(engine.sleep([0], raise_on_error=False))
        assert (ack.status, ack.metadata["error_code"]) == ("ERROR", "NOT_OBSERVED")
        assert ack.freed_bytes == pytest.approx(HELD, abs=MIB)


def test_orders_and_requests_are_spans(engine, monkeypatch):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    tracing._tracer.cache_clear()
    try:
        acks = asyncio.run(engine.sleep([1]))
        asyncio.run(engine.wake_up([1]))
        asyncio.run(collect(engine, request_id="r1"))
    finally:
        tracing._tracer.cache_clear()
    spans = {span.name: span.attributes for span in exporter.get_finished_spans()}
    assert set(spans) == {"omni.sleep", "omni.wake", "omni.request"}
    assert spans["omni.sleep"]["omni.freed_bytes"] == sum(ack.freed_bytes for ack in acks) > 0
    assert spans["omni.request"]["omni.request_state"] == "finished"
