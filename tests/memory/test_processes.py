"""What other processes see: residency from outside, files after SIGKILL, forked children, guards, limits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
import torch

from omni_notebook.memory.host import process_memory
from omni_notebook.memory.residency import resident_by_smaps
from tests.memory.pools import MIB, filled, sleep, wake

PRELUDE = """
import ctypes, os, sys, torch
from omni_notebook.errors import OutOfMemoryError
from omni_notebook.memory.cpu import CpuPool
MIB = 1024**2
def filled(pool, n_bytes, tag="weights"):
    tensor = pool.empty((n_bytes,), torch.uint8, tag, recomputable=False)
    return tensor.random_(1, 256)
"""


@pytest.fixture
def script(run_script):
    def run(body, *args):
        return run_script(PRELUDE + textwrap.dedent(body), *args)

    return run


@pytest.fixture
def child(tmp_path):
    """A child that runs a script and obeys one line at a time."""
    children = []

    def start(body):
        path = tmp_path / "child.py"
        path.write_text(PRELUDE + textwrap.dedent(body), encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        children.append(process)
        return process

    yield start
    for process in children:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def ask(process, line):
    process.stdin.write(line + "\n")
    return process.stdout.readline().strip()


CYCLER = """
pool = CpuPool(os.path.dirname(__file__))
weights, kv = filled(pool, 96 * MIB), pool.empty((32 * MIB,), torch.uint8)
golden = weights.clone()
print("ready", flush=True)
for line in sys.stdin:
    if line.startswith("sleep"):
        pool.prepare_sleep(int(line.split()[1]))
        print(pool.commit_sleep().observed_bytes, flush=True)
    elif line.startswith("wake"):
        needs = pool.map_restore()[1].needs_reload
        if needs:
            weights.copy_(golden)
        pool.commit_wake()
        print(torch.equal(weights, golden), flush=True)
    elif line.startswith("close"):
        pool.close()
        print("closed", flush=True)
"""


def test_another_process_sees_what_the_pool_says_it_freed(child):
    process = child(CYCLER)
    assert process.stdout.readline() == "ready\n"
    seen = psutil.Process(process.pid)
    awake = seen.memory_info().rss, process_memory(process.pid)
    freed = int(ask(process, "sleep 1"))
    asleep = seen.memory_info().rss, process_memory(process.pid)
    assert freed == 128 * MIB
    assert abs(awake[0] - asleep[0] - freed) < MIB
    assert abs(awake[1].rss_bytes - asleep[1].rss_bytes - freed) < MIB
    assert abs(awake[1].private_bytes - asleep[1].private_bytes - freed) < MIB
    assert ask(process, "wake") == "True"
    assert abs(seen.memory_info().rss - awake[0]) < MIB
    assert ask(process, "close") == "closed"
    assert abs(awake[0] - seen.memory_info().rss - freed) < MIB


@pytest.mark.parametrize("level", [1, 2])
def test_ten_cycles_leave_memory_flat(child, level):
    process = child(CYCLER)
    assert process.stdout.readline() == "ready\n"
    asleep, awake = [], []
    for _ in range(11):
        assert ask(process, f"sleep {level}") == str(128 * MIB)
        asleep.append(process_memory(process.pid).rss_bytes)
        assert ask(process, "wake") == "True"
        awake.append(process_memory(process.pid).rss_bytes)
    assert max(asleep[1:]) - min(asleep[1:]) < MIB
    assert max(awake[1:]) - min(awake[1:]) < MIB
    assert len(list(Path(f"/proc/{process.pid}/task").iterdir())) <= len(os.sched_getaffinity(0)) + 3


def test_pagemap_and_smaps_agree_about_a_pool(pool):
    filled(pool, 10 * MIB)
    segments = [content.segment for content in pool._core.books.contents()]

    def by_smaps():
        return sum(resident_by_smaps(segment.address, segment.span_bytes) for segment in segments)

    for step in (lambda: None, lambda: sleep(pool), lambda: segments[0].view.__setitem__(5, 1), lambda: wake(pool)):
        step()
        assert pool.memory()["weights"].resident_bytes == by_smaps()
    assert by_smaps() == 10 * MIB


def test_sigkill_leaves_no_file_and_no_room_taken(child, tmp_path):
    process = child(
        """
        pool = CpuPool(os.path.dirname(__file__))
        filled(pool, 64 * MIB)
        pool.prepare_sleep(1)
        pool.commit_sleep()
        print(os.listdir(os.path.dirname(__file__)), pool.host_backup_bytes(), flush=True)
        sys.stdin.readline()
        """
    )
    assert process.stdout.readline() == f"['child.py'] {64 * MIB}\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["child.py"]


def test_a_forked_child_keeps_no_pages_and_breaks_nothing(script, tmp_path):
    done = script(
        """
        from omni_notebook.memory.host import process_memory
        pool = CpuPool(sys.argv[1])
        weights = filled(pool, 64 * MIB)
        golden = weights.clone()
        read, write = os.pipe()
        before = pool.host_backup_bytes()
        pool.prepare_sleep(1)
        child = os.fork()
        if child == 0:
            os.write(write, str(process_memory().rss_bytes).encode())
            pool.close()
            del pool, weights, golden
            sys.exit(0)
        print("child exit", os.waitpid(child, 0)[1])
        print("child smaller", process_memory().rss_bytes - int(os.read(read, 100)) >= 64 * MIB)
        print("freed", pool.commit_sleep().observed_bytes // MIB)
        pool.map(); pool.restore(); pool.commit_wake()
        print("equal", torch.equal(weights, golden))
        """,
        str(tmp_path),
    )
    assert done.stdout.splitlines() == ["child exit 0", "child smaller True", "freed 64", "equal True"], done.stderr


def test_a_living_child_holds_no_room_after_close(script, tmp_path):
    done = script(
        """
        import signal
        pool = CpuPool(sys.argv[1])
        filled(pool, 64 * MIB)
        pool.prepare_sleep(1)
        spare = [os.dup(fd) for fd in pool._core.books["weights"].contents[0].spill._fds]
        child = os.fork()
        if child == 0:
            signal.pause()
        pool.close()
        print(sum(os.fstat(fd).st_blocks for fd in spare))
        os.kill(child, signal.SIGKILL)
        """,
        str(tmp_path),
    )
    assert done.stdout == "0\n", done.stderr


@pytest.mark.parametrize("where", [-1, 2 * MIB])
def test_guard_pages_catch_an_overrun(script, where):
    done = script(
        """
        weights = CpuPool().empty((2 * MIB,), torch.uint8)
        ctypes.memset(weights.data_ptr(), 1, 2 * MIB)
        print("inside", flush=True)
        ctypes.memset(weights.data_ptr() + int(sys.argv[1]), 1, 1)
        """,
        str(where),
    )
    assert done.stdout == "inside\n"
    assert done.returncode == -signal.SIGSEGV


def test_views_outlive_the_pool_without_a_crash(script):
    done = script(
        """
        import gc
        from omni_notebook.memory.host import process_memory
        pool = CpuPool()
        weights = filled(pool, 64 * MIB)
        view, array = weights[5:50], weights.numpy()
        before = process_memory().rss_bytes
        pool.close()
        freed = before - process_memory().rss_bytes
        del pool, weights
        gc.collect()
        view.fill_(3)
        print(int(view.sum()), int(array[:5].sum()), freed >= 63 * MIB)
        """
    )
    assert done.stdout == "135 0 True\n", done.stderr


def test_a_forgotten_pool_gives_memory_address_space_and_files_back(script):
    done = script(
        """
        import gc
        import psutil
        me = psutil.Process()
        def use():
            pool = CpuPool()
            weights = filled(pool, 64 * MIB)
            pool.prepare_sleep(1)
            pool.commit_sleep()
            pool.map_restore()
            return weights.data_ptr()
        def is_mapped(address):
            ranges = (line.split()[0].split("-") for line in open("/proc/self/maps"))
            return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)
        use(); gc.collect()
        rss, fds = me.memory_info().rss, me.num_fds()
        addresses = [use() for _ in range(3)]
        gc.collect()
        print([is_mapped(address) for address in addresses], me.memory_info().rss - rss < 8 * MIB, me.num_fds() - fds)
        """
    )
    assert done.stdout == "[False, False, False] True 0\n", done.stderr


def test_a_file_size_limit_is_a_refusal_with_bytes(script, tmp_path):
    done = script(
        """
        import resource
        pool = CpuPool(sys.argv[1])
        weights = filled(pool, 64 * MIB)
        golden = weights.clone()
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 * MIB, resource.RLIM_INFINITY))
        try:
            pool.prepare_sleep(1)
        except OutOfMemoryError as error:
            print(error.needed_bytes // MIB, "File too large" in str(error), pool.host_backup_bytes())
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        pool.prepare_sleep(1); pool.commit_sleep(); pool.map_restore(); pool.commit_wake()
        print(torch.equal(weights, golden))
        """,
        str(tmp_path),
    )
    assert done.stdout == "64 True 0\nTrue\n", done.stderr


def test_an_address_space_limit_refuses_new_memory_and_no_wake(script):
    done = script(
        """
        import resource
        pool = CpuPool()
        weights = filled(pool, 64 * MIB)
        golden = weights.clone()
        pool.prepare_sleep(1); pool.commit_sleep()
        used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + 32 * MIB, resource.RLIM_INFINITY))
        try:
            pool.empty((64 * MIB,), torch.uint8)
        except OutOfMemoryError as error:
            print(error.needed_bytes // MIB, sorted(pool.tags()))
        pool.map(); pool.restore(); pool.commit_wake()
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        print(torch.equal(weights, golden))
        """
    )
    assert done.stdout == "64 ['weights']\nTrue\n", done.stderr


def test_a_locked_process_can_sleep_too(script):
    done = script(
        """
        import resource
        try:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY,) * 2)
        except (ValueError, PermissionError):
            pass
        pool = CpuPool()
        weights = filled(pool, 4 * MIB)
        golden = weights.clone()
        locked = ctypes.CDLL(None).mlock(ctypes.c_void_p(weights.data_ptr()), ctypes.c_size_t(4 * MIB)) == 0
        pool.prepare_sleep(1)
        print(pool.commit_sleep().observed_bytes // MIB)
        pool.map(); pool.restore(); pool.commit_wake()
        print(torch.equal(weights, golden))
        """
    )
    assert done.stdout == "4\nTrue\n", done.stderr


@pytest.fixture
def tiny_tmpfs(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    yield folder if mounted.returncode == 0 else None
    if mounted.returncode == 0:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_tmpfs_refuses_and_a_small_backup_fits(make_pool, tiny_tmpfs):
    if tiny_tmpfs is None:  # no right to mount: the file size limit above stands for it
        return
    from omni_notebook.errors import OutOfMemoryError
    from omni_notebook.memory.host import is_in_ram

    assert is_in_ram(str(tiny_tmpfs))
    big = make_pool(spill_dir=str(tiny_tmpfs))
    weights = filled(big, 16 * MIB)
    before = weights.clone()
    with pytest.raises(OutOfMemoryError) as caught:
        big.prepare_sleep(1)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (16 * MIB, 8 * MIB)
    assert torch.equal(weights, before)
    small = make_pool(spill_dir=str(tiny_tmpfs))
    filled(small, 4 * MIB)
    sleep(small)
    assert os.statvfs(tiny_tmpfs).f_bavail * os.statvfs(tiny_tmpfs).f_frsize == 4 * MIB
    small.close()
    assert os.statvfs(tiny_tmpfs).f_bavail * os.statvfs(tiny_tmpfs).f_frsize == 8 * MIB
