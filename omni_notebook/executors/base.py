"""The contract of an executor: it carries calls to the ranks of one replica and gathers every rank's answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from omni_notebook.errors import DeadlineError

if TYPE_CHECKING:
    from omni_notebook.protocol import RankId, RankStatus
    from omni_notebook.worker.worker import WorkerSpec


class RankAnswer(NamedTuple):
    """What one rank said: a value, or the error that it raised or that stands for its silence."""

    where: RankId
    value: Any
    error: BaseException | None

    def unwrap(self) -> Any:
        """The value; raises the rank's error."""
        if self.error is not None:
            raise self.error
        return self.value


class Executor(Protocol):
    """The ranks of one replica. Calls reach each rank in the order in which they were made."""

    ranks: tuple[RankId, ...]

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> list[RankAnswer]:
        """Call `method` on every rank and gather the answers, in rank order; never raises for a rank.

        A rank that has not answered after `timeout_s` answers DeadlineError (its call goes on); a rank that is gone
        answers WorkerDiedError at once.
        """
        ...

    def cancel(self, task_id: str) -> None:
        """Tell every rank that an order should stop if it has not committed; returns at once."""
        ...

    def memory(self) -> list[RankStatus]:
        """Every rank's memory without waiting for its orders."""
        ...

    def shutdown(self) -> None:
        """Begin to end the ranks, after the calls made before; idempotent, returns at once, from any thread."""
        ...

    @property
    def ended(self) -> bool:
        """Whether the ranks are gone and have given everything back."""
        ...


class ExecutorFactory(Protocol):
    """Makes an executor for one replica; returns at once, the first call waits for the workers."""

    def __call__(self, specs: tuple[WorkerSpec, ...]) -> Executor:
        """One spec a rank."""
        ...


def silent(where: RankId, method: str, timeout_s: float) -> RankAnswer:
    """The answer that stands for a rank that has not answered in time."""
    message = f"rank {where.rank} of stage {where.stage_id} did not answer {method!r} within {timeout_s:g} s"
    return RankAnswer(where, None, DeadlineError(message))
