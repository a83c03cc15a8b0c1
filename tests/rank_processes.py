"""Ranks in processes of their own, each with one torch thread, that carry out calls on one object.

`python -m tests.rank_processes FD` is a rank; `Ranks` is the parent's side.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 50.0


class Ranks:
    """`size` processes; `make` gives each an object, `call` calls all and gathers values and errors."""

    def __init__(self, size):
        self._connections, self.processes = [], []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        for _ in range(size):
            ours, theirs = Pipe()
            command = [sys.executable, "-m", "tests.rank_processes", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT, env=environment)
            theirs.close()
            self._connections.append(ours)
            self.processes.append(process)

    @property
    def size(self):
        return len(self.processes)

    def send(self, rank, method, *args):
        self._connections[rank].send((method, args))

    def receive(self, rank, patience_s=PATIENCE_S):
        """A rank's answer: its value, or the error that it raised."""
        if not self._connections[rank].poll(patience_s):
            msg = f"rank {rank} was silent for {patience_s} s"
            raise TimeoutError(msg)
        value, error = self._connections[rank].recv()
        return value if error is None else error

    def answers(self, method, *args):
        """Every rank's value or error."""
        for rank in range(self.size):
            self.send(rank, method, *args)
        return [self.receive(rank) for rank in range(self.size)]

    def call(self, method, *args):
        """Every rank's value; raises the first rank's error."""
        answers = self.answers(method, *args)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def make(self, maker, *args):
        """Give every rank the object `maker(rank, size, *args)` and let them meet."""
        for rank in range(self.size):
            self.send(rank, "make", maker, rank, self.size, *args)
        for rank in range(self.size):
            answer = self.receive(rank)
            if isinstance(answer, BaseException):
                raise answer
        address = self.call("open_rendezvous")[0]
        self.call("join", address)

    def signal(self, rank, number):
        self.processes[rank].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[rank].wait()

    def close(self):
        for connection in self._connections:
            connection.close()
        for process in self.processes:
            process.kill()
            process.wait()


def _serve(connection):
    import torch

    torch.set_num_threads(1)
    target = None
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            return
        try:
            if method == "make":
                target, value = args[0](*args[1:]), None
            else:
                value = getattr(target, method)(*args)
        except Exception as error:  # noqa: BLE001  (it belongs to the caller)
            connection.send((None, error))
        else:
            connection.send((value, None))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
