"""A small process that answers line by line: what an audit looks through, and what it takes memory with."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

from omni_notebook.errors import OmniError

if TYPE_CHECKING:
    from types import TracebackType

ANSWER_S = 30.0


class ChildGoneError(OmniError):
    """The small process ended, or said nothing in time."""

    error_code = "CHILD_GONE"


class Child:
    """One of this package's scripts in a bare Python; it ends with this object, or with this process.

    Raises:
        OSError: no process could be made.
    """

    def __init__(self, script: str) -> None:
        path = Path(__file__).with_name(script)
        self._process = subprocess.Popen(  # noqa: S603  (our own script, by our own interpreter)
            [sys.executable, "-I", "-S", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            process_group=0,  # a terminal's Ctrl-C is for us
        )
        self.pid = self._process.pid

    def ask(self, line: str, timeout_s: float = ANSWER_S) -> str:
        """One line there, one line back.

        Raises:
            ChildGoneError: it has ended, or does not answer.
        """
        assert self._process.stdin is not None  # noqa: S101  (opened above)
        try:
            self._process.stdin.write(line.encode() + b"\n")
        except OSError:
            raise ChildGoneError(self._how_it_ended()) from None
        return self._line(timeout_s)

    def _line(self, timeout_s: float) -> str:
        assert self._process.stdout is not None  # noqa: S101  (opened above)
        got = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not got.endswith(b"\n"):
                if not selector.select(timeout_s):
                    msg = f"process {self.pid} did not answer within {timeout_s:g} s"
                    raise ChildGoneError(msg)
                part = os.read(self._process.stdout.fileno(), 65536)
                if not part:
                    raise ChildGoneError(self._how_it_ended())
                got += part
        return got.decode().rstrip("\n")

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return f"process {self.pid} does not answer"
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        return f"process {self.pid} {how}"

    def close(self) -> None:
        """End it; idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
