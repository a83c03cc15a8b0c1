"""A rank in a vLLM worker answers every order once, whatever goes wrong beside it; no vLLM is needed here."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import msgspec
import pytest

from omni_notebook.protocol import RankId, RankStatus
from omni_notebook.worker.vllm.rank import VllmRank, _Link
from omni_notebook.worker.vllm.wire import FromRank, RankReply, packed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class BlindRank(VllmRank):
    """Can not measure its memory, as where no file can be opened any more."""

    def __init__(self, address: str) -> None:
        self._where = RankId(0, 0, 1)
        self._link = _Link(address)

    def memory(self) -> RankStatus:
        raise OSError(24, "Too many open files", "/proc/self/statm")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as host:
        host.bind(str(tmp_path / "ranks"))
        yield host


def heard(host: socket.socket) -> FromRank:
    return msgspec.msgpack.decode(host.recv(65536), type=FromRank)


@pytest.mark.parametrize("method", ["ping", "no_such_order"])
def test_an_order_is_answered_though_memory_can_not_be_measured(host: socket.socket, method: str) -> None:
    rank = BlindRank(host.getsockname())
    with rank._link._socket:
        rank.answer(7, method, packed(()))
    reply = heard(host)
    assert isinstance(reply, RankReply)
    assert (reply.number, reply.rank) == (7, 1)
    if method == "ping":
        assert (reply.fault, msgspec.msgpack.decode(reply.value)) == (None, os.getpid())
    else:
        assert reply.fault is not None
        assert "no order 'no_such_order'" in reply.fault.message
    with pytest.raises(BlockingIOError):
        heard(host)
