"""The contract of a scheduler: three small moves, and policy that never mutates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.errors import OmniError
    from omni_notebook.stages.requests import StageRequest
    from omni_notebook.worker.batches import Prefetch


class Batch(msgspec.Struct, frozen=True):
    """Requests that run together, and the payload that their runner understands.

    `collect`: the batch's id, where its outputs are copied and encoded while the next batch runs; None where the answer
    of `execute` is the output. `milestones`: numbers of denoise steps after which the batch's progress is told.
    """

    requests: tuple[Any, ...]
    payload: Any
    collect: str | None = None
    milestones: tuple[int, ...] = ()


class Scheduler(Protocol):
    """Decides what runs next in one replica."""

    def add(self, request: StageRequest) -> None:
        """Queue a request."""
        ...

    def schedule(self) -> Batch | None:
        """The next batch, or None if nothing can run now."""
        ...

    def prefetch(self) -> Prefetch | None:
        """What the next batch needs and can be moved to the device while another runs, and what is there for nobody.

        None: no news.
        """
        ...

    def executed(self, batch: Batch, answer: Any) -> None:
        """A batch with `collect` has left the device; its outputs are on their way."""
        ...

    def finish(self, batch: Batch, answer: Any, weight_version: str) -> None:
        """Take a batch's results and deliver them."""
        ...

    def fail(self, batch: Batch, error: BaseException) -> None:
        """End a batch's requests with an error."""
        ...

    def requeue(self) -> None:
        """Put what was begun back into the queue, at its head: device state is gone, it will be computed again."""
        ...

    def end_all(self, error: OmniError) -> None:
        """End every request with an error: the stage has failed."""
        ...

    def abort(self, request_id: str) -> bool:
        """End one request with a terminal output; whether it was here."""
        ...

    def abandoned_batch(self) -> str | None:
        """The running batch's id if all its requests were aborted and it can stop early, else None."""
        ...

    def request_ids(self) -> Sequence[str]:
        """Every request that is here."""
        ...

    @property
    def running(self) -> int:
        """Requests that have begun."""
        ...

    @property
    def queued(self) -> int:
        """Requests that have not begun."""
        ...
