"""One rank's process: started without fork or `multiprocessing`, watched by pidfd, ended with its whole group."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from omni_notebook.errors import UnsupportedError
from omni_notebook.executors.mp.logs import make_log
from omni_notebook.executors.mp.placement import environment

if TYPE_CHECKING:
    from omni_notebook.executors.mp.placement import Place

_CHILD = "omni_notebook.executors.mp.child"


class RankProcess:
    """A child, the parent's end of its socket (non-blocking), its pidfd and its log.

    `place` None: it may use all processors, and the numeric libraries' own defaults.

    Raises:
        UnsupportedError: there is no interpreter to start (an embedded Python).
        OSError: too many processes or files; nothing is left.
    """

    def __init__(self, place: Place | None) -> None:
        if not sys.executable:
            msg = "executor='mp' starts sys.executable, and this Python has none; use executor='uni'"
            raise UnsupportedError(msg)
        with contextlib.ExitStack() as undo:
            self.log = make_log()
            undo.callback(os.close, self.log)
            self.socket, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(self.socket.close)
            with far:
                self._process = _start(far, self.log, place)
            self.pid = self._process.pid
            undo.callback(_kill, self._process)
            self.pidfd = os.pidfd_open(self.pid)
            self.socket.setblocking(False)
            undo.pop_all()
        self._finalizer = weakref.finalize(self, _end, self._process, (self.socket, self.pidfd, self.log), os.getpid())
        self._finalizer.atexit = False  # whoever made it may still want to end it in order; it dies with us anyway

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child and all that it has started."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def reap(self) -> int | None:
        """The exit status if it has ended (negative: the signal); what it started ends with it."""
        if self._process.returncode is None and _has_ended(self.pidfd):
            self.signal(signal.SIGKILL)  # before the wait: until then nobody else can have its number
            self._process.wait()
        return self._process.returncode

    def close(self) -> None:
        """End it now and give its files back; idempotent."""
        self._finalizer()


def _start(far: socket.socket, log: int, place: Place | None) -> subprocess.Popen[bytes]:
    me = os.pidfd_open(os.getpid())
    try:
        return subprocess.Popen(  # noqa: S603  (our own module, no shell)
            [sys.executable, "-P", "-m", _CHILD, str(far.fileno()), str(me)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(far.fileno(), me),
            process_group=0,  # not a session: one is an autogroup, and ranks that compute starve who waits for them
            env=_environment(place),
        )
    finally:
        os.close(me)


def _environment(place: Place | None) -> dict[str, str]:
    """The parent's, with its import path: a notebook or a script may have changed it."""
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    ours = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    return {**os.environ, **ours, **({} if place is None else environment(place))}


def _has_ended(pidfd: int) -> bool:
    """Whether the process is gone or a zombie; leaves it to be waited for. Source: waitid(2)."""
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return True  # somebody else in this process has waited for it


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _end(process: subprocess.Popen[bytes], files: tuple[socket.socket, int, int], owner_pid: int) -> None:
    """Close, and kill what still runs; a forked copy of the parent only closes: the child is not its own."""
    if os.getpid() == owner_pid:
        _kill(process)
    near, pidfd, log = files
    near.close()
    os.close(pidfd)
    os.close(log)
