"""Residency, write tracking, checksums and host figures, each against a second opinion."""

from __future__ import annotations

import ctypes
import importlib.machinery
import os
import sys
import types

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_notebook.errors import UnsupportedError
from omni_notebook.memory import host, platforms, residency, tracking
from omni_notebook.memory.arena import CHUNK, Segment
from omni_notebook.memory.checksum import digest, sum_bytes, sum_segments
from omni_notebook.memory.cpu import CpuPool
from tests.memory.pools import MIB, filled, sleep

PAGE = os.sysconf("SC_PAGE_SIZE")
tracked = pytest.mark.skipif(tracking.why_not_tracked() is not None, reason=f"{tracking.why_not_tracked()}")


def both(segment):
    return (
        residency.resident_by_pagemap(segment.address, segment.span_bytes),
        residency.resident_by_smaps(segment.address, segment.span_bytes),
    )


def test_both_probes_count_pages_that_came_one_by_one():
    segment = Segment(6 * MIB)
    assert both(segment) == (6 * MIB, 6 * MIB)
    segment.close()
    assert both(segment) == (0, 0)
    for page in (0, 1, 7, 513, 1535):
        segment.view[page * PAGE] = 1
    assert both(segment) == (5 * PAGE, 5 * PAGE)


def test_reading_sleeping_pages_counts_for_nobody():
    segment = Segment(6 * MIB)
    segment.release()
    assert bytes(segment.view) == bytes(6 * MIB)
    assert both(segment) == (0, 0)
    segment.close()
    assert bytes(segment.view[:CHUNK]) == bytes(CHUNK)
    assert both(segment) == (0, 0)


def test_many_scattered_pages_need_several_answers_of_the_kernel():
    segment = Segment(12 * MIB)
    segment.close()
    for page in range(0, 3072, 2):
        segment.view[page * PAGE] = 1
    assert both(segment) == (1536 * PAGE, 1536 * PAGE)


def test_without_pagemap_scan_smaps_answers(monkeypatch):
    segment = Segment(4 * MIB)
    monkeypatch.setattr(residency, "has_pagemap_scan", lambda: False)
    monkeypatch.setattr(residency, "resident_by_pagemap", None)
    assert segment.resident_bytes() == 4 * MIB
    segment.release()
    assert segment.resident_bytes() == 0


def test_a_kernel_without_pagemap_scan_is_found_out(monkeypatch):
    def refuse(*_):
        raise OSError(25, "Inappropriate ioctl for device")

    monkeypatch.setattr(residency.libc, "ioctl", refuse)
    residency.has_pagemap_scan.cache_clear()
    try:
        assert residency.has_pagemap_scan() is False
    finally:
        residency.has_pagemap_scan.cache_clear()


# ----------------------------------------------------------------------------------- write tracking


def take_written(tracker, segment):
    flags = tracker.written(segment)
    tracker.arm(segment, flags)
    return flags


@tracked
@given(writes=st.lists(st.tuples(st.integers(0, 8 * MIB - 1), st.integers(1, 3 * MIB)), max_size=6))
@settings(max_examples=30, deadline=None)
def test_exactly_the_written_chunks_are_told_once(writes):
    segment, tracker = Segment(8 * MIB), tracking.WriteProtect()
    tracker.register(segment)
    assert take_written(tracker, segment).all()
    expected = np.zeros(4, bool)
    for start, length in writes:
        end = min(start + length, 8 * MIB)
        ctypes.memset(segment.address + start, 7, end - start)
        expected[start // CHUNK : (end - 1) // CHUNK + 1] = True
    assert take_written(tracker, segment).tolist() == expected.tolist()
    assert not take_written(tracker, segment).any()
    tracker.close()


@tracked
def test_pages_that_were_given_up_count_as_written():
    segment, tracker = Segment(4 * MIB), tracking.WriteProtect()
    tracker.register(segment)
    take_written(tracker, segment)
    segment.release()
    for chunk in segment.chunks():
        chunk.populate()
    assert take_written(tracker, segment).all()
    tracker.close()
    tracker.close()


def test_a_refused_userfaultfd_means_checksums(monkeypatch):
    def refuse(_flags):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(tracking.libc, "userfaultfd", refuse)
    tracking.why_not_tracked.cache_clear()
    try:
        assert "not permitted" in tracking.why_not_tracked()
        assert isinstance(tracking.make_tracker("auto"), tracking.Untracked)
        with pytest.raises(OSError, match="not permitted"):
            tracking.make_tracker("userfaultfd")
        assert "checksums" in platforms.describe_platforms()[0].reason
    finally:
        tracking.why_not_tracked.cache_clear()


@tracked
def test_tracking_that_is_taken_away_copies_all_and_loses_nothing(tmp_path):
    pool = CpuPool(str(tmp_path), tracking="userfaultfd")
    weights = filled(pool, 6 * MIB)
    sleep(pool)
    pool.map_restore()
    pool.commit_wake()
    pool._core.tracker.close()
    weights[5] ^= 1
    before = weights.clone()
    assert sleep(pool)[0].copied_bytes == 6 * MIB
    pool.map_restore()
    pool.commit_wake()
    assert weights.equal(before)
    pool.close()


# ---------------------------------------------------------------------------------------- checksums


def plain_sums(data):
    """The definition, in Python's own integers."""
    from omni_notebook.memory.checksum import chunk_weights

    low, high = chunk_weights()
    words = np.frombuffer(data, "<u8").tolist()
    one = sum(word * int(weight) for word, weight in zip(words, low, strict=False))
    two = sum((word >> 32) * int(weight) for word, weight in zip(words, high, strict=False))
    return one % 2**64, two % 2**64


@pytest.mark.parametrize("words", [0, 1, 7, 32768, 32769, 70000])
def test_the_checksum_is_its_definition(words):
    data = np.random.default_rng(words).bytes(8 * words)
    assert sum_bytes(memoryview(data)) == plain_sums(data)


@given(
    changes=st.dictionaries(st.integers(0, 4095), st.integers(1, 255), min_size=1, max_size=8), seed=st.integers(0, 9)
)
@settings(max_examples=100, deadline=None)
def test_any_change_changes_the_checksum(changes, seed):
    data = bytearray(np.random.default_rng(seed).bytes(4096))
    before = sum_bytes(memoryview(data))
    for place, flip in changes.items():
        data[place] ^= flip
    assert sum_bytes(memoryview(data)) != before


@pytest.mark.parametrize("bit", [15, 31, 47, 63])
def test_flipped_signs_do_not_cancel(bit):
    data = np.zeros(4096, np.uint64)
    before = sum_bytes(memoryview(data.tobytes()))
    data[[5, 900]] ^= np.uint64(1 << bit)
    assert sum_bytes(memoryview(data.tobytes())) != before


def test_swapped_words_do_not_cancel():
    data = np.arange(1024, dtype=np.uint64)
    before = sum_bytes(memoryview(data.tobytes()))
    data[[3, 700]] = data[[700, 3]]
    assert sum_bytes(memoryview(data.tobytes())) != before


def test_a_digest_is_of_the_contents_and_not_of_the_place():
    segments = [Segment(5 * MIB), Segment(5 * MIB)]
    for segment in segments:
        np.frombuffer(segment.view, np.uint8)[: 5 * MIB] = np.arange(5 * MIB) % 251
    one, two = (
        digest(sum_segments([segment], lanes=lanes).values()) for segment, lanes in zip(segments, (1, 2), strict=True)
    )
    assert one == two
    segments[1].view[5 * MIB - 1] ^= 1
    assert digest(sum_segments([segments[1]], lanes=2).values()) != one


# --------------------------------------------------------------------------------------------- host


def test_process_memory_is_what_psutil_says():
    held = bytearray(os.urandom(1)) * (64 * MIB)
    mine, theirs = host.process_memory(), psutil.Process().memory_full_info()
    assert abs(mine.rss_bytes - theirs.rss) < 8 * MIB
    assert abs(mine.private_bytes - theirs.uss) < 8 * MIB
    assert len(held) < mine.private_bytes <= mine.rss_bytes
    assert host.process_memory(os.getppid()).rss_bytes > 0


def test_a_process_that_is_not_there_is_said_so():
    with pytest.raises(ProcessLookupError, match="4194999"):
        host.process_memory(4_194_999)


def test_without_the_right_to_read_smaps_statm_answers(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise PermissionError

    expected = host.process_memory()
    monkeypatch.setattr(host.Path, "read_text", refuse)
    assert abs(host.process_memory().rss_bytes - expected.rss_bytes) < 8 * MIB


def test_host_memory_is_at_most_the_machines():
    memory = host.host_memory()
    assert 0 < memory.available_bytes <= memory.limit_bytes <= psutil.virtual_memory().total


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_cgroup_counts(tmp_path, monkeypatch, version):
    root = tmp_path if version == 2 else tmp_path / "memory"
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}[version]
    for folder, limit in (
        (root, "9223372036854771712" if version == 1 else "max"),
        (root / "a", 5 * MIB),
        (root / "a/b", 9 * MIB),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names[0]).write_text(f"{limit}\n")
        (folder / names[1]).write_text(f"{4 * MIB}\n")
        (folder / "memory.stat").write_text(f"anon {3 * MIB}\ninactive_file {MIB}\nactive_file 0\n")
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    monkeypatch.setattr(host, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(host, "_cgroup_paths", lambda: [(version, "/a/b")])
    assert host.host_memory().limit_bytes == 5 * MIB
    assert host.host_memory().available_bytes == 2 * MIB


def test_disk_room_in_ram_is_bounded_by_ram(tmp_path, monkeypatch):
    on_disk = host.disk_free_bytes(str(tmp_path))
    assert on_disk > 0
    monkeypatch.setattr(host, "is_in_ram", lambda _folder: True)
    assert host.disk_free_bytes(str(tmp_path)) <= min(on_disk + MIB, host.host_memory().limit_bytes)


def test_the_processor_has_a_name(monkeypatch):
    assert host.cpu_name()
    monkeypatch.setattr(host.Path, "read_text", lambda *_args, **_kwargs: "flags : fpu\n")
    assert host.cpu_name() == os.uname().machine


# ---------------------------------------------------------------------------------------- platforms


def test_the_cpu_has_a_pool_and_says_how_it_measures(tmp_path):
    cpu, *others = platforms.describe_platforms()
    assert (cpu.platform, cpu.supported) == ("cpu", True)
    assert "residency by" in cpu.reason
    pool = platforms.create_pool("cpu", spill_dir=str(tmp_path), backup="checkpoint")
    assert (pool.platform, pool.device, pool.device_name) == ("cpu", "cpu", host.cpu_name())
    pool.close()
    assert platforms.create_pool("auto").platform == "cpu"
    for other in others:
        with pytest.raises(UnsupportedError, match=other.platform):
            platforms.create_pool(f"{other.platform}:0")


def test_an_old_kernel_another_system_and_a_switched_off_mode_are_refused_with_the_reason(monkeypatch):
    with pytest.raises(UnsupportedError, match="enable_sleep_mode=True"):
        platforms.create_pool("cpu", enable_sleep_mode=False)
    with pytest.raises(UnsupportedError, match="unknown"):
        platforms.create_pool("tpu")
    for wrong in ("cuda:x", "cuda:-1", "cpu: 1", "auto:²"):
        with pytest.raises(UnsupportedError, match="number of a device"):
            platforms.create_pool(wrong)
    monkeypatch.setattr(platforms, "linux_release", lambda: (5, 10))
    with pytest.raises(UnsupportedError, match=r"5\.14 or newer \(this is 5\.10\)"):
        platforms.create_pool("cpu")
    monkeypatch.setattr(platforms.sys, "platform", "darwin")
    with pytest.raises(UnsupportedError, match="darwin"):
        platforms.create_pool("cpu")


class FakeNvml(types.ModuleType):
    class NVMLError(Exception):
        pass

    def __init__(self, gpus):
        super().__init__("pynvml")
        self.gpus = gpus

    def nvmlInit(self):  # noqa: N802 - NVML's name
        if self.gpus is None:
            msg = "Driver Not Loaded"
            raise self.NVMLError(msg)

    def nvmlDeviceGetCount(self):  # noqa: N802
        return self.gpus


def cuda_platform():
    (cuda,) = [info for info in platforms.describe_platforms() if info.platform == "cuda"]
    return cuda.supported, cuda.reason


def test_cuda_is_there_where_a_gpu_and_torch_for_it_are_and_says_what_of_vllm_is_missing(monkeypatch, tmp_path):
    specs = {}
    for name in ("vllm", "torch"):
        specs[name] = importlib.machinery.ModuleSpec(name, None, is_package=True)
        specs[name].submodule_search_locations = [str(tmp_path / name)]
        (tmp_path / name / "lib").mkdir(parents=True)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert cuda_platform() == (False, "cuda: nvidia-ml-py, which measures, is not installed; pip install nvidia-ml-py")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(None))
    assert cuda_platform() == (False, "cuda: the NVIDIA driver can not be asked (Driver Not Loaded)")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(0))
    assert cuda_platform() == (False, "cuda: the NVIDIA driver knows no GPU")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(1))
    monkeypatch.setattr(platforms.importlib.util, "find_spec", lambda _name: None)
    assert cuda_platform() == (False, "cuda: the torch that is installed was built without CUDA")
    monkeypatch.setattr(
        platforms.importlib.util, "find_spec", lambda name: specs.get(name) if name == "torch" else None
    )
    (tmp_path / "torch" / "lib" / "libtorch_cuda.so").touch()
    assert cuda_platform() == (True, "stages of our own; vLLM is not installed; measured by NVML")
    monkeypatch.setattr(platforms.importlib.util, "find_spec", specs.get)
    assert cuda_platform()[1].startswith("stages of our own; vLLM was built without cumem_allocator")
    (tmp_path / "vllm" / "cumem_allocator.abi3.so").touch()
    monkeypatch.setattr(platforms.importlib.metadata, "version", lambda _name: "0.24.0")
    supported, reason = cuda_platform()
    assert supported
    assert reason.startswith("stages of our own; vLLM stages over the allocator of vLLM 0.24.0")
    with pytest.raises(UnsupportedError, match=r"cuda:0: torch sees 0 CUDA devices.*device='cpu'"):  # its word counts
        platforms.create_pool("cuda:0")
    assert platforms.create_pool("auto").platform == "cpu"
    with pytest.raises(UnsupportedError, match="backup='checkpoint' is for stages on a CPU"):
        platforms.create_pool("cuda:0", backup="checkpoint")
