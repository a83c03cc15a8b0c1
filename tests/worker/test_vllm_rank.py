"""A rank in a vLLM worker answers every order once, whatever goes wrong beside it; no vLLM is needed here."""

from __future__ import annotations

import errno
import os
import re
import socket
from typing import TYPE_CHECKING

import msgspec
import pytest

from omni_notebook.errors import ConfigError, UnsupportedError
from omni_notebook.protocol import RankId, RankStatus
from omni_notebook.worker.faults import describe, rebuild, shortened
from omni_notebook.worker.vllm import rank as rank_module
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


class WordyRank(BlindRank):
    """Raises what is longer than a datagram, or answers so."""

    raised: Exception | None = None

    def ping(self) -> int:
        if self.raised is not None:
            raise self.raised
        return "x" * 300_000  # type: ignore[return-value]


@pytest.mark.parametrize("characters", [30_000, 300_000, 3_000_000])
@pytest.mark.parametrize(
    "raising", ["ours", "python's", "several arguments", "many arguments", "attributes", "many attributes", "a value"]
)
def test_an_answer_that_is_too_long_for_a_datagram_comes_shorter(
    host: socket.socket, raising: str, characters: int
) -> None:
    text = f"the weights do not fit: {'x' * characters}; nothing changed"
    rank = WordyRank(host.getsockname())
    rank.raised = {
        "ours": ConfigError(text),
        "python's": ValueError(text),
        "several arguments": OSError(22, text, "/a/file"),
        "many arguments": ValueError("the weights do not fit; nothing changed", *["x"] * characters),
        "attributes": ConfigError("the weights do not fit; nothing changed"),
        "many attributes": ConfigError("the weights do not fit; nothing changed"),
        "a value": None,
    }[raising]
    if raising == "attributes":
        assert rank.raised is not None
        vars(rank.raised).update(names=[text], first="here")
    if raising == "many attributes":
        vars(rank.raised).update((str(number), "x") for number in range(characters // 10))
    with rank._link._socket:
        rank.answer(7, "ping", packed(()))
    reply = heard(host)
    assert isinstance(reply, RankReply)
    assert reply.fault is not None
    error = rebuild(reply.fault)
    if raising == "a value":
        assert isinstance(error, UnsupportedError)
        assert "the answer has 300005 bytes" in str(error)
        return
    assert type(error) is type(rank.raised)
    assert re.search(r"the weights do not fit.*nothing changed", str(error))
    if raising == "attributes":
        assert vars(error)["first"] == "here"


def test_what_a_shortened_error_left_out_is_said() -> None:
    said = str(rebuild(shortened(describe(ConfigError("a" * 600 + "ö" * 600)), 16_000)))
    assert said == "a" * 500 + " … (200 characters left out) … " + "ö" * 500


@pytest.mark.parametrize("gone", [True, False])
def test_an_answer_that_can_not_be_sent_is_not_raised_where_vllm_would_mistake_it(
    host: socket.socket, gone: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_module, "SEND_AGAIN_S", (0.0,))
    rank = WordyRank(host.getsockname())
    rank.raised = ValueError("x" * 20_000)
    with rank._link._socket as link:
        if gone:
            host.close()
        else:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 0)  # the least that the system allows
        for _ in range(3):  # the system says it another way from the second time on
            rank.answer(7, "ping", packed(()))
    said = capfd.readouterr().err
    assert said.count("rank 1 could not send its answer: [Errno") == (0 if gone else 3)


def test_an_answer_for_which_there_is_no_memory_is_sent_again(
    host: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = BlindRank(host.getsockname())
    tried, refusals = rank._link._tried, [OSError(errno.ENOBUFS, "none"), OSError(errno.ENOMEM, "none")]
    monkeypatch.setattr(rank._link, "_tried", lambda data: refusals.pop() if refusals else tried(data))
    with rank._link._socket:
        rank.answer(7, "ping", packed(()))
    assert isinstance(heard(host), RankReply)
