"""How far the running batch is, for those who asked before it began; one thread asks and steps."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Milestones:
    """Answers when a batch has made so many steps, at the latest when it has ended."""

    def __init__(self) -> None:
        self._asked: list[tuple[str, int, Future[bool]]] = []

    def ask(self, batch_id: str, steps: int) -> Future[bool]:
        """Is done once the batch, which comes next, has made so many steps; False: it ended before."""
        future: Future[bool] = Future()
        self._asked.append((batch_id, steps, future))
        return future

    @contextmanager
    def of(self, batch_id: str) -> Iterator[None]:
        """Within it this batch runs; questions about one that never came are answered now."""
        self._answer([one for one in self._asked if one[0] != batch_id], reached=False)
        try:
            yield
        finally:
            self._answer(list(self._asked), reached=False)

    def passed(self, steps: int) -> None:
        """The running batch has made so many steps."""
        self._answer([one for one in self._asked if one[1] <= steps], reached=True)

    def _answer(self, those: list[tuple[str, int, Future[bool]]], *, reached: bool) -> None:
        for one in those:
            self._asked.remove(one)
            one[2].set_result(reached)
