"""Mixed traffic against a served engine for minutes: nothing may be lost, and memory must stay flat.

    python -m benchmarks.soak_server --minutes 10

The server is a process of its own (`omni-notebook serve demo`, every rank a process). Pictures and texts are compared
with those of before the traffic; clients that leave half-way, listeners, mistakes and orders run beside them. Memory is
looked at from outside, with all stages awake, after every round of orders.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import dataclasses
import io
import itertools
import json
import statistics
import subprocess
import sys
import time
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from PIL import Image
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    import httpx

PROMPT, STEPS, SEEDS = "a red star above a blue circle", 4, 5
WARM_SHARE = 1 / 3
"""Of the samples: what a server takes once, for its first requests of every kind, is no growth."""
BOUNDS = {"server_bytes": 1 << 20, "ranks_bytes": 1 << 20, "files": 1, "threads": 1}
"""The growth a minute that counts as none."""
MISTAKES: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/v1/omni/sleep", {"level": 3}),
    ("POST", "/v1/omni/sleep", {"stage_ids": [7]}),
    ("POST", "/v1/omni/wakeup", {"tags": ["nothing"]}),
    ("POST", "/v1/omni/pause", {"mode": "later"}),
    ("POST", "/v1/images/generations", {"prompt": PROMPT, "n": 0}),
    ("POST", "/v1/images/generations", {"prompt": PROMPT, "model": "another"}),
    ("POST", "/v1/chat/completions", {"messages": []}),
    ("GET", "/v1/nothing", None),
)
ROUND: tuple[tuple[str, dict[str, Any]], ...] = (
    ("sleep", {"stage_ids": [0], "level": 1, "mode": "keep"}),
    ("wakeup", {}),
    ("sleep", {"stage_ids": [1], "level": 2, "mode": "keep"}),
    ("wakeup", {"stage_ids": [1]}),
    ("pause", {"mode": "keep"}),
    ("resume", {}),
    ("sleep", {"level": 2, "mode": "wait"}),
    ("wakeup", {}),
    ("wakeup", {}),
)


@dataclasses.dataclass
class Sample:
    """All awake: private bytes of the server and of its ranks together, and what the server holds open."""

    minute: float
    server_bytes: int
    ranks_bytes: int
    files: int
    threads: int


@dataclasses.dataclass
class Soak:
    """What came of it."""

    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    wrong: list[str] = dataclasses.field(default_factory=list)
    samples: list[Sample] = dataclasses.field(default_factory=list)

    def count(self, what: str) -> None:
        """One more."""
        self.counts[what] = self.counts.get(what, 0) + 1


class Traffic:
    """The clients."""

    def __init__(self, http: httpx.AsyncClient, server: psutil.Process, soak: Soak, until_s: float) -> None:
        self._http, self._server, self._soak, self._until_s = http, server, soak, until_s
        self._began_s = time.monotonic()
        self._golden: list[Any] = []
        self._text = ""

    async def run(self) -> None:
        """Until the time is over and every client has ended by itself."""
        self._golden = [await self._picture(seed) for seed in range(SEEDS)]
        self._text = await self._chat()
        numbers = itertools.count()
        leaving = self._vanish(), self._leave_text(), self._listen()
        asking = self._draw(numbers), self._draw(numbers), self._write(), self._err(), self._look()
        await asyncio.gather(self._order(), *asking, *leaving)

    def _going(self) -> bool:
        return time.monotonic() < self._until_s

    def _ask(self, what: str, is_so: bool, found: object) -> None:
        self._soak.count(what)
        if not is_so:
            self._soak.wrong.append(f"{what}: {found}"[:300])

    async def _draw(self, numbers: Iterator[int]) -> None:
        while self._going():
            seed = next(numbers) % SEEDS
            off = int(np.abs(await self._picture(seed) - self._golden[seed]).max())
            self._ask("pictures", off <= 1, f"seed {seed} is off by {off} of 255")  # another batch rounds otherwise

    async def _picture(self, seed: int) -> Any:
        body = {"prompt": PROMPT, "num_inference_steps": STEPS, "seed": seed}
        answer = await self._http.post("/v1/images/generations?wait=120", json=body)
        answer.raise_for_status()
        png = base64.b64decode(answer.json()["data"][0]["b64_json"])
        return np.asarray(Image.open(io.BytesIO(png)), dtype=np.int16)

    async def _write(self) -> None:
        while self._going():
            text = await self._chat()
            self._ask("texts", text == self._text, text)

    async def _chat(self, most: int = 1 << 30) -> str:
        body = {"messages": [{"role": "user", "content": PROMPT}], "stream": True}
        said = ""
        async with self._http.stream("POST", "/v1/chat/completions?wait=120", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    found = json.loads(line.removeprefix("data: "))
                    said += "".join(choice["delta"].get("content", "") for choice in found["choices"])
                    most -= 1
                if most <= 0:
                    break
        return said

    async def _vanish(self) -> None:
        """Leave while a picture is drawn."""
        while self._going():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._picture(0), 0.1)
            self._soak.count("pictures left half-way")
            await asyncio.sleep(0.5)

    async def _leave_text(self) -> None:
        while self._going():
            await self._chat(most=3)
            self._soak.count("texts left half-way")
            await asyncio.sleep(0.5)

    async def _listen(self) -> None:
        while self._going():
            async with self._http.stream("GET", "/v1/omni/events") as answer:
                count = 0
                async for line in answer.aiter_lines():
                    count += line.startswith("data:")
                    if count >= 20 or not self._going():
                        break
            self._soak.count("listeners")

    async def _err(self) -> None:
        for method, path, body in itertools.cycle(MISTAKES):
            if not self._going():
                return
            answer = await self._http.request(method, path, json=body)
            self._ask("mistakes", 400 <= answer.status_code < 500, f"{path} {body}: {answer.status_code} {answer.text}")
            await asyncio.sleep(0.2)

    async def _look(self) -> None:
        while self._going():
            for path in ("/v1/omni/status", "/metrics", "/health"):
                answer = await self._http.get(path)
                self._ask("looks", answer.status_code == 200, answer.text)
            await asyncio.sleep(0.5)

    async def _order(self) -> None:
        while self._going():
            for name, body in ROUND:
                answer = await self._http.post(f"/v1/omni/{name}", json=body)
                said = answer.json().get("status")
                done = said in {"SUCCESS", "SKIPPED"}
                self._ask("orders", done, f"{name} {body}: {answer.status_code} {answer.text}")
            self._soak.samples.append(await asyncio.to_thread(self._sample))

    def _sample(self) -> Sample:
        ranks = self._server.children(recursive=True)
        return Sample(
            minute=(time.monotonic() - self._began_s) / 60,
            server_bytes=self._server.memory_full_info().uss,
            ranks_bytes=sum(rank.memory_full_info().uss for rank in ranks),
            files=self._server.num_fds(),
            threads=self._server.num_threads(),
        )


def growth(samples: list[Sample], of: Callable[[Sample], float]) -> float:
    """Units a minute: the line through the samples after the warm part."""
    kept = samples[int(len(samples) * WARM_SHARE) :]
    if len(kept) < 3:
        return float("nan")
    return statistics.linear_regression([one.minute for one in kept], [of(one) for one in kept]).slope


async def _soak(url: str, server: psutil.Process, minutes: float) -> Soak:
    import httpx  # noqa: PLC0415  (a test's library)

    soak = Soak()
    limits = httpx.Limits(max_connections=50)
    async with httpx.AsyncClient(base_url=url, timeout=180, limits=limits) as http:
        await Traffic(http, server, soak, time.monotonic() + minutes * 60).run()
    return soak


@contextlib.contextmanager
def _served() -> Iterator[tuple[str, psutil.Process]]:
    command = [sys.executable, "-m", "omni_notebook.server", "--model", "demo", "--enable-sleep-mode"]
    command += ["--tp", "2", "--executor", "mp", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            said = process.stdout.readline() if process.stdout else ""
            yield next(word for word in said.split() if word.startswith("http")), psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(60)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.soak_server", description="Mixed traffic for minutes.")
    parser.add_argument("--minutes", type=float, default=10.0)
    args = parser.parse_args()
    with _served() as (url, server):
        work: Coroutine[Any, Any, Soak] = _soak(url, server, args.minutes)
        soak = asyncio.run(work)
    return _show(soak)


def _show(soak: Soak) -> int:
    table = Table("what", "count", title="what was asked")
    for what, count in sorted(soak.counts.items()):
        table.add_row(what, str(count))
    console = Console()
    console.print(table)
    flat = True
    for name, bound in BOUNDS.items():
        grown = growth(soak.samples, attrgetter(name))
        flat = flat and grown <= bound
        first, last = (getattr(soak.samples[at], name) for at in (0, -1))
        console.print(f"{name}: {first} → {last} over {len(soak.samples)} rounds, {grown:+.1f} a minute (bar {bound})")
    for line in soak.wrong[:20]:
        console.print(f"WRONG {line}")
    console.print(f"{len(soak.wrong)} wrong answers; memory is {'flat' if flat else 'NOT flat'}")
    return 0 if flat and not soak.wrong else 1


if __name__ == "__main__":
    sys.exit(main())
