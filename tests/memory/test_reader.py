"""Files read straight into device memory: every byte, and nothing left behind when it ends early."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch

from omni_notebook.errors import OutOfMemoryError
from omni_notebook.memory.arena import no_memory
from omni_notebook.memory.base import DeviceError
from omni_notebook.memory.device import reader as reading
from omni_notebook.memory.reading import FilePiece
from omni_notebook.memory.residency import resident_bytes
from tests.memory.fake_cuda import MIB
from tests.memory.fake_ranges import OwnMachine

PART = 4096


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def machine(request, monkeypatch):
    monkeypatch.setattr(reading, "_BUFFER", PART)
    monkeypatch.setattr(reading, "usable_cpus", lambda: request.param)
    return OwnMachine()


@pytest.fixture
def target(machine):
    return machine.pool().empty((MIB,), torch.uint8, "weights", recomputable=False)


@pytest.fixture
def reader(machine, target):
    return machine.pool().reader()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(torch.randint(0, 256, (200_000,), dtype=torch.uint8).numpy().tobytes())
    with path.open("rb", buffering=0) as stream:
        yield stream


def content(file):
    return Path(file.name).read_bytes()


@pytest.fixture(autouse=True)
def nothing_left(machine):
    """No thread, lock on host memory, event or copy outlives a read."""
    yield
    assert [one.name for one in threading.enumerate() if one.name == "omni-read"] == []
    assert machine.pinned == {}
    assert machine.libcuda.events == 0
    assert not any(machine.libcuda.streams.values())


def nothing():
    pass


def piece(file, target, offset, n_bytes, place):
    return FilePiece(file, offset, n_bytes, target.data_ptr() + place)


@pytest.mark.parametrize("n_bytes", [1, PART - 1, PART, PART + 1, 7 * PART + 5, 150_000])
def test_a_piece_is_read_to_the_byte_and_nothing_beside_it(reader, file, target, n_bytes):
    data = torch.frombuffer(bytearray(content(file)), dtype=torch.uint8)
    reader.read([piece(file, target, 1234, n_bytes, 77)], nothing)
    assert torch.equal(target[77 : 77 + n_bytes], data[1234 : 1234 + n_bytes])
    assert not target[:77].any()
    assert not target[77 + n_bytes :].any()


def test_pieces_of_several_files_each_come_to_their_place(reader, file, tmp_path, target):
    other = tmp_path / "other"
    other.write_bytes(bytes([7]) * 50_000)
    pieces = [piece(file, target, 1000 * n, 1000, 1000 * (50 - n)) for n in range(50)]
    with other.open("rb", buffering=0) as stream:
        reader.read([*pieces, piece(stream, target, 10, 40_000, 100_000)], nothing)
    data = torch.frombuffer(bytearray(content(file)), dtype=torch.uint8)
    for one in pieces:
        place = one.address - target.data_ptr()
        assert torch.equal(target[place : place + 1000], data[one.offset : one.offset + 1000])
    assert (target[100_000:140_000] == 7).all()


def test_a_reader_serves_again_and_makes_no_more_streams(reader, machine, file, target):
    streams = []
    for turn in range(3):
        reader.read([piece(file, target, turn, 30_000, 0)], nothing)
        streams.append(set(machine.libcuda.streams))
    assert streams[0] == streams[1] == streams[2]
    assert target[:30_000].numpy().tobytes() == content(file)[2:30_002]


@pytest.mark.parametrize("n_bytes", [PART, 150_000])
def test_each_thread_makes_its_own_buffers_and_one_that_has_nothing_to_read_makes_none(
    reader, machine, file, target, monkeypatch, n_bytes
):
    made, pin = [], machine.libcuda.pin
    monkeypatch.setattr(
        machine.libcuda, "pin", lambda *args: (made.append((threading.current_thread().name, args[1])), pin(*args))[1]
    )
    reader.read([piece(file, target, 0, n_bytes, 0)], nothing)
    assert set(made) == {("omni-read", 2 * MIB)}
    assert len(made) <= (1 if n_bytes == PART else reading.usable_cpus())


def test_memory_that_the_driver_does_not_unlock_is_not_given_back(reader, machine, file, target):
    machine.fail("unpin", 1)
    with pytest.raises(DeviceError, match="cuMemHostUnregister"):
        reader.read([piece(file, target, 0, PART, 0)], nothing)
    gc.collect()  # the error kept what was on its way
    ((address, n_bytes),) = machine.pinned.items()
    machine.pinned.clear()
    del reader
    gc.collect()
    assert resident_bytes(address, n_bytes) == n_bytes
    reading._NOT_UNLOCKED.clear()


@pytest.mark.parametrize("had", [0, 1, 2])
def test_threads_without_buffers_leave_the_work_to_the_others_and_without_any_nothing_is_read(
    reader, file, target, monkeypatch, had
):
    made, make = [], reading.Segment

    def segment(n_bytes):
        made.append(n_bytes)
        if len(made) > had:
            raise no_memory(n_bytes)
        return make(n_bytes)

    monkeypatch.setattr(reading, "Segment", segment)
    if had:
        reader.read([piece(file, target, 0, 150_000, 0)], nothing)
        assert target[:150_000].numpy().tobytes() == content(file)[:150_000]
    else:
        with pytest.raises(OutOfMemoryError, match="nothing changed"):
            reader.read([piece(file, target, 0, 150_000, 0)], nothing)
        assert not target.any()


def test_no_more_threads_read_than_processors_may_be_used_now(reader, machine, file, target, monkeypatch):
    reader.read([piece(file, target, 0, 150_000, 0)], nothing)
    monkeypatch.setattr(reading, "usable_cpus", lambda: 1)
    started, start = [], threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (started.append(thread), start(thread))[1])
    reader.read([piece(file, target, 0, 150_000, 0)], nothing)
    assert len(started) == 1


def test_nothing_to_read_is_fine(reader):
    reader.read([], nothing)


def test_it_waits_for_what_was_begun_on_the_device_before(reader, machine, file, target, monkeypatch):
    order, synchronize, copy = [], machine.cuda.synchronize, machine.libcuda.copy
    monkeypatch.setattr(machine.cuda, "synchronize", lambda index: (order.append("wait"), synchronize(index)))
    monkeypatch.setattr(machine.libcuda, "copy", lambda *args: (order.append("copy"), copy(*args)))
    reader.read([piece(file, target, 0, 10, 0)], nothing)
    assert order == ["wait", "copy"]


def test_a_thread_that_has_not_seen_the_device_may_read(reader, file, target):
    failed = []

    def read():
        try:
            reader.read([piece(file, target, 0, 10_000, 0)], nothing)
        except BaseException as error:  # noqa: BLE001  (whatever it is)
            failed.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert failed == []
    assert target[:10_000].numpy().tobytes() == content(file)[:10_000]


# ---------------------------------------------------------------------------------------- ending early


@pytest.mark.parametrize("turns", [0, 1, 5])
def test_whoever_is_asked_between_parts_can_end_it(reader, file, target, turns):
    asked = []

    def check():
        asked.append(1)
        if len(asked) > turns:
            msg = "cancelled"
            raise KeyError(msg)

    with pytest.raises(KeyError, match="cancelled"):
        reader.read([piece(file, target, 0, 100_000, 0)], check)
    assert turns < len(asked) <= turns + reading.usable_cpus()  # no thread goes on


def test_a_file_that_ends_early_is_an_error_and_no_signal(reader, file, target):
    with pytest.raises(OSError, match=r"data ends 100 bytes before the end of a tensor"):
        reader.read([piece(file, target, 199_000, 1100, 0)], nothing)


def test_a_file_that_can_not_be_read_is_an_error_that_names_it(reader, file, target, tmp_path):
    with (tmp_path / "unreadable").open("wb", buffering=0) as other, pytest.raises(OSError, match="unreadable"):
        reader.read([piece(other, target, 0, 10, 0), piece(file, target, 0, 100_000, 0)], nothing)


@pytest.mark.parametrize("number", [1, 2, 9])
@pytest.mark.parametrize("name", ["memcpy", "event", "wait"])
def test_a_copy_that_the_driver_refuses_ends_it_after_all_that_was_begun(reader, machine, file, target, name, number):
    machine.fail(name, number)
    with pytest.raises(DeviceError):
        reader.read([piece(file, target, 0, 150_000, 0)], nothing)
    reader.read([piece(file, target, 0, 150_000, 0)], nothing)
    assert target[:150_000].numpy().tobytes() == content(file)[:150_000]


def test_no_buffer_goes_while_a_copy_reads_it(reader, machine, file, target, monkeypatch):
    """Also where several waits fail: the others are waited for."""
    wait = machine.libcuda.wait

    def failing(stream):
        wait(stream)
        msg = "cuStreamSynchronize: CUDA driver error 1"
        raise DeviceError(msg)

    monkeypatch.setattr(machine.libcuda, "wait", failing)
    with pytest.raises(DeviceError):
        reader.read([piece(file, target, 0, 150_000, 0)], nothing)


def test_threads_that_can_not_be_started_end_it_after_those_that_could(reader, machine, file, target, monkeypatch):
    start, count = threading.Thread.start, []

    def refuse(thread):
        count.append(1)
        if len(count) == reading.usable_cpus():
            msg = "can't start new thread"
            raise RuntimeError(msg)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        reader.read([piece(file, target, 0, 150_000, 0)], nothing)


def test_memory_that_can_not_be_locked_is_used_all_the_same(reader, machine, file, target):
    machine.libcuda.pin_fails = True
    reader.read([piece(file, target, 0, 50_000, 0)], nothing)
    assert target[:50_000].numpy().tobytes() == content(file)[:50_000]
