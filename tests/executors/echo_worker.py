"""A worker without torch, for child processes that start fast: it echoes, waits, fails, exits, hangs, allocates."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from omni_notebook.errors import ConfigError, OutOfMemoryError
from omni_notebook.memory.base import TransitionCancelledError
from omni_notebook.protocol import OmniACK, RankId, RankStatus, TagMemory

ECHO = "tests.executors.echo_worker:EchoWorker"


class OddError(Exception):
    """Of a class that lives where the parent does not look."""


def make_error(kind: str) -> BaseException:
    """One of the errors that tests raise in a rank."""
    errors: dict[str, BaseException] = {
        "config": ConfigError("no such key"),
        "memory": OutOfMemoryError("no room", needed_bytes=7, free_bytes=5),
        "cancelled": TransitionCancelledError("stopped"),
        "os": OSError(28, "No space left on device", "/spill/file"),
        "value": ValueError("two", 2),
        "plain memory": MemoryError("mmap"),
        "odd": OddError("strange"),
        "exit": SystemExit(3),
        "unicode": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad start"),
        "surrogate": ValueError("no weights in \udcff.safetensors"),
    }
    return errors[kind]


def _after(seconds: float, work: Any) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001  (the order's own)
            future.set_exception(error)

    threading.Timer(seconds, run).start()
    return future


class EchoWorker:
    """Answers at once whatever it is asked; all methods are orders but for `memory`, `cancel` and `prefetch`."""

    def __init__(self, spec: Any) -> None:
        if spec.version == "broken":
            msg = "this worker can not be made"
            raise ConfigError(msg)
        if spec.version == "dies":
            print("about to die", flush=True)
            os._exit(9)
        self.where: RankId = spec.where
        self.journal: list[Any] = []
        self.cancelled: set[str] = set()
        self.held: dict[str, Any] = {}
        self.told = threading.Event()
        self.last: list[Future[Any]] = []
        self.closed = False

    def shutdown(self) -> None:
        """Nothing is held; who waits for the last word gets it."""
        self.closed = True
        for future in self.last:
            future.set_result("last word")

    def cancel(self, task_id: str) -> None:
        self.cancelled.add(task_id)

    def prefetch(self, wanted: Any) -> None:
        self.journal.append(list(wanted.keep))
        self.told.set()

    def memory(self) -> RankStatus:
        held = {tag: TagMemory(len(data), len(data)) for tag, data in self.held.items()}
        return RankStatus(
            rank=self.where.rank,
            replica=self.where.replica,
            pid=os.getpid(),
            device="cpu",
            alive=True,
            tags=held,
            host_backup_bytes=0,
            process_bytes=None,
        )

    # ---------------------------------------------------------------------------------- orders

    def ping(self) -> int:
        return os.getpid()

    def noop(self, task_id: str) -> OmniACK:
        rank = self.where.rank
        return OmniACK(task_id=task_id, status="SUCCESS", stage_id=0, rank=rank, freed_bytes=0, metadata={})

    def echo(self, value: Any) -> Any:
        return value

    def rank(self) -> int:
        return self.where.rank

    def note(self, value: Any) -> list[Any]:
        self.journal.append(value)
        return list(self.journal)

    def wait(self, seconds: float) -> str:
        time.sleep(seconds)
        return "done"

    def wait_on(self, rank: int, seconds: float) -> str:
        """One rank is slow."""
        if self.where.rank == rank:
            time.sleep(seconds)
        return "done"

    def work(self, task_id: str, seconds: float) -> str:
        """Until done or cancelled."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if task_id in self.cancelled:
                return "cancelled"
            time.sleep(0.005)
        return "done"

    def wait_until_told(self, seconds: float) -> Any:
        """Until `prefetch` was called: whether it was, and what it said."""
        return [self.told.wait(seconds), self.journal]

    # ------------------------------------------------------------------- orders answered by a future

    def later(self, seconds: float, value: Any) -> Future[Any]:
        """Answer when the time has come; the next order need not wait."""
        return _after(seconds, lambda: value)

    def fail_later(self, seconds: float, kind: str) -> Future[Any]:
        def broken() -> None:
            raise make_error(kind)

        return _after(seconds, broken)

    def later_on(self, rank: int, seconds: float) -> Any:
        """One rank answers later, the others at once."""
        return self.later(seconds, "late") if self.where.rank == rank else "at once"

    def never(self) -> Future[Any]:
        return Future()

    def called_off(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.cancel()
        return future

    def at_the_end(self) -> Future[Any]:
        """Answered by `shutdown`."""
        self.last.append(Future())
        return self.last[-1]

    def exit_later_on(self, rank: int, seconds: float) -> Any:
        """One rank dies while its answer is on its way."""
        if self.where.rank != rank:
            return "done"
        threading.Timer(seconds, os._exit, (9,)).start()
        return Future()

    # ----------------------------------------------------------------------------------- errors

    def fail(self, kind: str) -> None:
        raise make_error(kind)

    def fail_on(self, rank: int, kind: str) -> str:
        """One rank raises."""
        if self.where.rank == rank:
            raise make_error(kind)
        return "done"

    def wait_or_fail(self, rank: int, seconds: float) -> Any:
        """One rank raises, the others are slow."""
        return self.fail_on(rank, "value") if self.where.rank == rank else self.wait_on(self.where.rank, seconds)

    def hold(self, tag: str, n_bytes: int) -> None:
        """Keep memory."""
        self.held[tag] = bytes(n_bytes)

    def hold_later(self, tag: str, n_bytes: int, seconds: float) -> None:
        """Memory that changes while nobody orders anything."""
        threading.Timer(seconds, self.hold, (tag, n_bytes)).start()

    def break_cancel(self) -> None:
        """From now on `cancel` raises."""
        del self.cancelled

    def total(self, values: Any) -> float:
        return float(values.sum())

    def unsendable(self) -> object:
        return threading.Lock()

    # ----------------------------------------------------- what only a process of its own can bear

    def say(self, text: str) -> None:
        print(text, flush=True)
        print(f"{text} on stderr", file=sys.stderr, flush=True)

    def exit(self, status: int) -> None:
        print("last words", flush=True)
        os._exit(status)

    def exit_on(self, rank: int) -> str:
        if self.where.rank == rank:
            os._exit(9)
        return "done"

    def crash(self) -> None:
        ctypes.string_at(0)

    def stop_self(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def hog(self, seconds: int) -> None:
        """C code that keeps the interpreter."""
        ctypes.PyDLL(None).sleep(seconds)

    def spawn(self) -> int:
        """A grandchild that would outlive us."""
        return subprocess.Popen(["sleep", "600"], close_fds=False).pid

    def facts(self) -> dict[str, Any]:
        return {
            "threads": os.environ["OMP_NUM_THREADS"],
            "cpus": sorted(os.sched_getaffinity(0)),
            "torch": "torch" in sys.modules,
            "numpy": "numpy" in sys.modules,
            "fds": len(list(Path("/proc/self/fd").iterdir())),
            "maps": sum("omni-frame" in line for line in Path("/proc/self/maps").read_text().splitlines()),
            "path": sys.path,
        }


class DyingWorker(EchoWorker):
    """Does not survive its first order."""

    def load(self) -> None:
        print("no strength to load", flush=True)
        os._exit(1)


class HangingWorker(EchoWorker):
    """Does not come up."""

    def load(self) -> None:
        time.sleep(3600)


class AsyncEchoWorker(EchoWorker):
    """The same for an executor whose ranks share a thread: what takes time is a coroutine."""

    async def wait_until_told(self, seconds: float) -> Any:  # type: ignore[override]
        return [await asyncio.to_thread(self.told.wait, seconds), self.journal]

    async def wait(self, seconds: float) -> str:  # type: ignore[override]
        await asyncio.sleep(seconds)
        return "done"

    async def wait_on(self, rank: int, seconds: float) -> str:  # type: ignore[override]
        if self.where.rank == rank:
            await asyncio.sleep(seconds)
        return "done"

    async def work(self, task_id: str, seconds: float) -> str:  # type: ignore[override]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if task_id in self.cancelled:
                return "cancelled"
            await asyncio.sleep(0.005)
        return "done"
