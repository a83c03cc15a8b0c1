"""`omni-notebook demo`: the main job in a terminal, with the same verbs as in a notebook."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.text import Text

from omni_notebook.cli import screen
from omni_notebook.errors import ArgumentError, SleepError, WakeError
from omni_notebook.protocol import sampling_params_from
from omni_notebook.units import size
from omni_notebook.verbs import registry
from omni_notebook.verbs.session import Session

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

    from rich.console import Console

    from omni_notebook.verbs.generating import Generation

BEFORE, AFTER = "before-sleep.png", "after-wake.png"
_LEVELS = {1: "a copy is kept in a spill file", 2: "nothing is kept, the wake reads the checkpoint again"}
_LOOK = "import psutil, sys; print(psutil.Process(int(sys.argv[1])).memory_info().rss)"


def run(args: Namespace) -> int:
    """Start, draw, sleep, wake, draw again, compare; the exit status.

    Raises:
        ArgumentError: bad input; nothing was started.
        OmniError: an order failed.
    """
    check(args)
    show = screen.console()
    with _session(show) as session:
        return Demo(session, show, args).run()


def check(args: Namespace) -> None:
    """Refuse what can not work, before anything is started.

    Raises:
        ArgumentError: names what is wrong.
    """
    if not args.prompt.strip():
        msg = "the prompt is empty; give --prompt TEXT; nothing was started"
        raise ArgumentError(msg)
    sampling_params_from({"seed": args.seed, "num_inference_steps": args.steps})
    place = args.out
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        msg = f"--out {args.out}: {place} is no folder that can be written ({error.strerror}); nothing was started"
        raise ArgumentError(msg) from None


@contextmanager
def _session(show: Console) -> Iterator[Session]:
    """A session whose engine is stopped however this ends."""
    session = Session(screen.TerminalFrontend(show))
    try:
        yield session
    finally:
        running = session.running
        if running is not None:
            running.shutdown()


class Demo:
    """One run: `args` as `parsing` reads them."""

    def __init__(self, session: Session, show: Console, args: Namespace) -> None:
        self._session = session
        self._show = show
        self._args = args
        self._freed_bytes = 0

    def run(self) -> int:
        """All steps; 0 if the pictures are identical, 1 if they differ or a rank answered ERROR."""
        self._start()
        before = self._generate("Draw")
        if not (self._sleep() and self._wake()):
            return 1
        after = self._generate("Draw the same again")
        self._save({BEFORE: before, AFTER: after})
        return self._conclude(before, after)

    def _say(self, step: str, more: str = "") -> None:
        self._show.print(Text.assemble((step, "bold"), f"  {more}" if more else ""), soft_wrap=True)

    def _do(self, line: str, cell: str | None = None) -> Any:
        return registry.execute(self._session, line, cell)

    def _start(self) -> None:
        ballast = self._args.ballast
        filler = f", {size(ballast)} of ballast in each to make memory visible" if ballast else ""
        self._say("Start", f"two trained stages on the CPU{filler}")
        begin = time.perf_counter()
        self._do(f"start --ballast {ballast}B")
        self._show.print(f"ready in {time.perf_counter() - begin:.1f} s\n", style="dim")

    def _generate(self, step: str) -> Generation:
        self._say(step, f"“{self._args.prompt.strip()}”")
        made: Generation = self._do(f"generate --seed {self._args.seed} --steps {self._args.steps}", self._args.prompt)
        self._show.print()
        return made

    def _sleep(self) -> bool:
        level = self._args.level
        self._say("Sleep", f"both stages, level {level}: {_LEVELS[level]}")
        before = observed_rss_bytes()
        if not self._order(f"sleep --level {level}"):
            return False
        after = observed_rss_bytes()
        self._freed_bytes = sum(ack.freed_bytes for ack in self._session.acks)
        self._show.print(
            f"RSS of this process, read by another one: {size(before)} before, {size(after)} after, "
            f"{size(before - after)} less\n"
        )
        self._say("Status")
        self._show.print(screen.status_table(self._session.engine.status()))
        return True

    def _wake(self) -> bool:
        self._say("Wake", "both stages: map, fill, verify")
        if not self._order("wake"):
            return False
        self._show.print(f"RSS of this process, read by another one: {size(observed_rss_bytes())}\n")
        return True

    def _order(self, line: str) -> bool:
        """Carry out a sleep or a wake and show every rank's answer; whether all are SUCCESS."""
        failure = ""
        try:
            self._do(line)
        except (SleepError, WakeError) as error:
            failure = str(error)
        names = {stage.stage_id: stage.name for stage in self._session.engine.status().stages}
        self._show.print(screen.ack_table(self._session.acks, names))
        note = screen.shared_residual(self._session.acks)
        if note:
            self._show.print(note, style="dim", soft_wrap=True)
        if failure:
            self._say("A rank answered ERROR.", failure)
        return not failure

    def _save(self, pictures: dict[str, Generation]) -> None:
        self._args.out.mkdir(parents=True, exist_ok=True)
        for name, made in pictures.items():
            made.images[0].save(self._args.out / name)

    def _conclude(self, before: Generation, after: Generation) -> int:
        hashes = picture_hash(before), picture_hash(after)
        same = hashes[0] == hashes[1]
        words = f"{BEFORE} and {AFTER} in {self._args.out}: sha256 {hashes[0][:16]}… and {hashes[1][:16]}…"
        freed = size(self._freed_bytes)
        verdict = (
            f"Identical. The stages gave back {freed}, came back, and draw the same picture."
            if same
            else f"DIFFERENT. The stages gave back {freed} and came back, but the second picture is another one."
        )
        self._show.print(Text(words, style="dim"), soft_wrap=True)
        self._show.print(Text(verdict, style="bold green" if same else "bold red"), soft_wrap=True)
        return 0 if same else 1


def picture_hash(made: Generation) -> str:
    """SHA-256 of the picture's pixels."""
    return hashlib.sha256(made.images[0].tobytes()).hexdigest()


def observed_rss_bytes() -> int:
    """This process's resident memory, as another process sees it through psutil."""
    command = [sys.executable, "-c", _LOOK, str(os.getpid())]
    return int(subprocess.run(command, check=True, capture_output=True).stdout)  # noqa: S603  (fixed, no input)
