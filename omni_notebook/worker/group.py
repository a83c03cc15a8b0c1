"""A rank's way into and out of its tensor-parallel group; the group serves forward passes, never control orders."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from omni_notebook.errors import ArgumentError, OmniError
from omni_notebook.models.parallel import SOLO, TensorParallel, first_line

LOOPBACK = "127.0.0.1"
_INTERFACE = "GLOO_SOCKET_IFNAME"


class JoinError(OmniError):
    """The ranks of a tensor-parallel group did not find one another; nothing was loaded."""

    error_code = "JOIN"


class RankGroup:
    """One rank's membership: rank 0 opens a rendezvous, all ranks join there, each leaves by itself.

    gloo over the loopback interface on a CPU, nccl between GPUs. `timeout_s` bounds the joining and each exchange of a
    forward pass.
    """

    def __init__(self, size: int, rank: int, timeout_s: float, device: str = "cpu") -> None:
        self._size = size
        self._rank = rank
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._server: Any = None
        self._parallel: TensorParallel | None = SOLO if size == 1 else None

    @property
    def parallel(self) -> TensorParallel:
        """The rank's place in the group.

        Raises:
            JoinError: it has not joined.
        """
        if self._parallel is None:
            msg = f"rank {self._rank} has not joined its {self._size} ranks; call join(rendezvous) on all of them first"
            raise JoinError(msg)
        return self._parallel

    def open(self) -> str | None:
        """Listen on a free port of the loopback interface; the address for `join`. None but on rank 0 of several."""
        if self._size == 1 or self._rank != 0:
            return None
        with socket.socket() as listener:  # our own: the store's would listen on every interface
            listener.bind((LOOPBACK, 0))
            listener.listen()
            port: int = listener.getsockname()[1]
            self._server = _store(LOOPBACK, port, self._timeout, is_master=True, master_listen_fd=listener.detach())
        return f"tcp://{LOOPBACK}:{port}"

    def join(self, rendezvous: str) -> None:
        """Meet the other ranks, once; does nothing for one rank by itself.

        Raises:
            ArgumentError: `rendezvous` is no "tcp://host:port".
            JoinError: the others did not come in time.
        """
        if self._size == 1:
            return
        host, port = _address(rendezvous)
        if host == LOOPBACK:
            os.environ.setdefault(_INTERFACE, "lo")  # not whatever interface the host's name resolves to
        try:
            self._parallel = self._meet(host, port)
        except (RuntimeError, ValueError) as error:
            msg = (
                f"rank {self._rank} did not meet its {self._size} ranks at {rendezvous} within "
                f"{self._timeout.total_seconds():g} s: {first_line(error)}. Nothing was loaded; "
                "restart(stage_id) tries again"
            )
            raise JoinError(msg) from error

    def _meet(self, host: str, port: int) -> TensorParallel:
        """A group of our own: the default one of the process stays free, and modules of torch keep references to it."""
        store = self._server or _store(host, port, self._timeout)
        make = _gloo if self._device == "cpu" else _nccl
        return TensorParallel(self._size, self._rank, make(store, self._rank, self._size, self._timeout), self._device)

    def close(self) -> None:
        """Leave the group without waiting for anyone; idempotent.

        The others' next exchange fails: over gloo at once, over nccl when it is out of time, if nothing fails sooner.
        """
        self._server = None
        if self._parallel is not None:
            self._parallel.leave()


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupGloo  # noqa: PLC0415

    return ProcessGroupGloo(store, rank, size, timeout=timeout)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A group whose exchanges block the caller until they are done or out of time, as gloo's do."""
    from torch.distributed import ProcessGroupNCCL  # noqa: PLC0415  (CUDA builds alone)

    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # whatever is set: without it a watchdog ends the whole process
    options = ProcessGroupNCCL.Options()
    options._timeout = timeout  # noqa: SLF001  (there is no other way)
    return ProcessGroupNCCL(store, rank, size, options)


def _store(host: str, port: int, timeout: timedelta, **known: Any) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415  (one rank never needs it)

    return TCPStore(host, port, wait_for_workers=False, timeout=timeout, **known)


def _address(rendezvous: str) -> tuple[str, int]:
    try:
        parts = urlsplit(rendezvous)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError:
        scheme, host, port = "", None, None
    if scheme != "tcp" or host is None or port is None:
        msg = f"{rendezvous!r} is no rendezvous; give what open_rendezvous() of rank 0 answered, tcp://host:port"
        raise ArgumentError(msg)
    return host, port
