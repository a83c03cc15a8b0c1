"""A process of a stage: it holds real memory, or has children that do and passes lines on to them.

    python process.py TITLE BYTES SEED [CHILDREN]

One line of JSON there, one back. It ends with its stdin.
"""

import json
import mmap
import os
import random
import subprocess
import sys
import tempfile
import time
import zlib

BLOCK = 1 << 16
STARTED = []


class Memory:
    """Bytes that only the seed tells; asleep they are in a file."""

    def __init__(self, n_bytes, seed):
        self.n_bytes = n_bytes
        self.held = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block = random.Random(seed).randbytes(BLOCK)
        for place in range(0, n_bytes, BLOCK):
            self.held[place : place + BLOCK] = block
        self.file = None

    def sleep(self):
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  (it lives until the wake)
        for place in range(0, self.n_bytes, BLOCK):
            self.file.write(self.held[place : place + BLOCK])
        self.file.flush()
        self.held.close()
        self.held = None
        return self.n_bytes

    def wake(self):
        if self.held is None:
            self.held = mmap.mmap(-1, self.n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.file.seek(0)
            for place in range(0, self.n_bytes, BLOCK):
                self.held[place : place + BLOCK] = self.file.read(BLOCK)
            self.file.close()
        return True

    def answer(self, order):
        if order == "sleep":
            return self.sleep()
        if order == "wake":
            return self.wake()
        if order == "checksum":
            assert self.held is not None, "asleep"
            return zlib.crc32(self.held)
        if order == "usage":
            return 0 if self.held is None else self.n_bytes
        if order == "die":
            os._exit(9)
        raise ValueError(order)


class Children:
    """Ranks below this process, asked together."""

    def __init__(self, count, n_bytes, seed):
        names = [f"DiffusionWorker_TP{rank}" for rank in range(count)]
        self.ranks = [start(name, n_bytes, seed) for name in names]

    def answer(self, order):
        asked = self.ranks[-1:] if order == "die" else self.ranks
        return [ask(one, order) for one in asked]


def start(title, n_bytes, seed, children=0):
    words = [sys.executable, "-S", __file__, title, str(n_bytes), str(seed), str(children)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    STARTED.append(process)
    assert json.loads(process.stdout.readline()) == "ready"
    return process


def close_all():
    """End what a test left on purpose; only then are the pipes closed."""
    for process in STARTED:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
    STARTED.clear()


def ask(process, order):
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    return json.loads(line) if line else None


def main():
    _title, n_bytes, seed, children = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    memory = Children(children, n_bytes, seed) if children else Memory(n_bytes, seed)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order == "stubborn":  # does not end with its stdin
            print(json.dumps(True), flush=True)
            time.sleep(600)
        print(json.dumps(memory.answer(order)), flush=True)


if __name__ == "__main__":
    main()
