"""Files read straight into host memory: every byte, seen by write tracking, and nothing left behind."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
import torch

from omni_notebook.memory.cpu import CpuPool
from omni_notebook.memory.reading import FilePiece
from tests.memory.fake_cuda import MIB

SIZE = 12 * MIB


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("read") / "data"
    path.write_bytes(torch.randint(0, 256, (SIZE,), dtype=torch.uint8).numpy().tobytes())
    return path


@pytest.fixture
def file(path):
    with path.open("rb", buffering=0) as stream:
        yield stream


@pytest.fixture
def pool(tmp_path):
    threads = threading.active_count()
    pool = CpuPool(str(tmp_path))
    yield pool
    pool.close()
    assert threading.active_count() == threads


@pytest.fixture
def target(pool):
    return pool.empty((SIZE + 100,), torch.uint8, "weights", recomputable=False)


def nothing():
    pass


@pytest.mark.parametrize("n_bytes", [0, 1, 2 * MIB - 1, 2 * MIB + 1, 11 * MIB + 3])
def test_a_piece_is_read_to_the_byte_and_nothing_beside_it(pool, file, target, n_bytes):
    pool.reader().read([FilePiece(file, 1234, n_bytes, target.data_ptr() + 77)], nothing)
    assert target[77 : 77 + n_bytes].numpy().tobytes() == Path(file.name).read_bytes()[1234 : 1234 + n_bytes]
    assert not target[:77].any()
    assert not target[77 + n_bytes :].any()


def test_what_was_read_is_in_the_next_backup(pool, file, target):
    """The kernel wrote it, at an address: no version counter of torch has moved."""
    pool.write_ahead()
    assert pool.wait_write_ahead(60)
    pool.reader().read([FilePiece(file, 0, SIZE, target.data_ptr())], nothing)
    pool.prepare_sleep(1)
    pool.commit_sleep()
    pool.map_restore()
    pool.commit_wake()
    assert target[:SIZE].numpy().tobytes() == Path(file.name).read_bytes()


@pytest.mark.parametrize("n_bytes", [MIB, 2 * MIB], ids=["one thread", "several"])
def test_whoever_is_asked_between_parts_ends_it_and_is_asked_by_one_thread(pool, file, target, n_bytes):
    asked = []

    def check():
        asked.append(threading.get_ident())
        if len(asked) == 2:
            msg = "cancelled"
            raise KeyError(msg)

    pieces = [FilePiece(file, at * n_bytes, n_bytes, target.data_ptr() + at * n_bytes) for at in range(6)]
    with pytest.raises(KeyError, match="cancelled"):
        pool.reader().read(pieces, check)
    assert asked == [threading.get_ident()] * 2


@pytest.mark.parametrize("n_bytes", [2000, 11 * MIB], ids=["one thread", "several"])
def test_a_file_that_ends_early_is_an_error_and_no_signal(pool, file, target, n_bytes):
    piece = FilePiece(file, SIZE - n_bytes + 100, n_bytes, target.data_ptr())
    with pytest.raises(OSError, match=r"data ends 100 bytes before the end of a tensor"):
        pool.reader().read([piece], nothing)


def test_a_file_that_can_not_be_read_is_an_error_that_names_it(pool, target, tmp_path):
    with (
        (tmp_path / "unreadable").open("wb", buffering=0) as file,
        pytest.raises(OSError, match="unreadable") as caught,
    ):
        pool.reader().read([FilePiece(file, 0, 10, target.data_ptr())], nothing)
    assert caught.value.errno == errno.EBADF
