"""OpenTelemetry spans of orders and requests, where its API is installed; nothing else is imported, none is kept else.

The API is looked for once, when the first span begins. What it does with a span (nothing, without an SDK) is its own
affair: OTEL_SDK_DISABLED and the exporters are settings of the SDK. A token or a look at the status makes no span.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from omni_notebook.protocol import MemoryState, OmniACK

PREFIX = "omni."


class Span:
    """One span, or nothing where there is no API; every method may be called in either case."""

    def __init__(self, span: Any = None) -> None:
        self._span = span

    def note(self, **attributes: Any) -> None:
        """Set attributes (`stage_id` becomes `omni.stage_id`); None says nothing and is left out."""
        if self._span is not None:
            known = {PREFIX + key: value for key, value in attributes.items() if value is not None}
            self._span.set_attributes(known)

    def answered(self, acks: Sequence[OmniACK]) -> None:
        """Note what ranks answered: bytes measured, and the first error code."""
        if self._span is None or not acks:
            return
        wrong = [ack for ack in acks if not ack.ok]
        code = next((ack.metadata.get("error_code") for ack in wrong), None)
        self.note(
            task_id=acks[0].task_id,
            freed_bytes=sum(ack.freed_bytes for ack in acks),
            ranks=len(acks),
            ranks_failed=len(wrong),
            error_code=code,
        )
        if wrong:
            self._fail(str(wrong[0].error_msg))

    def state(self, state: MemoryState) -> None:
        """Note the stage's state at the end."""
        self.note(state=str(state))

    def failed(self, error: BaseException) -> None:
        """The error that ended it; its class's code."""
        if self._span is not None:
            self.note(error_code=getattr(error, "error_code", type(error).__name__))
            self._span.record_exception(error)
            self._fail(str(error))

    def _fail(self, words: str) -> None:
        from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415  (there is a span, so it is there)

        self._span.set_status(Status(StatusCode.ERROR, words))

    def end(self) -> None:
        """It is over; only for a span of `begun`."""
        if self._span is not None:
            self._span.end()


@functools.cache
def _tracer() -> Any:
    try:
        from opentelemetry import trace  # noqa: PLC0415  (an extra, looked for when the first span begins)
    except ImportError:
        return None
    return trace.get_tracer("omni_notebook")


def begun(name: str, **attributes: Any) -> Span:
    """A span that ends by `end()`, for what does not end where it began; a child of the one that is current here."""
    tracer = _tracer()
    if tracer is None:
        return Span()
    span = Span(tracer.start_span(PREFIX + name))
    span.note(**attributes)
    return span


@contextmanager
def span(name: str, **attributes: Any) -> Iterator[Span]:
    """A span of what happens inside; an error that leaves it is its status.

    Cancelling is no error: it is the attribute `omni.cancelled`.
    """
    tracer = _tracer()
    if tracer is None:
        yield Span()
        return
    with tracer.start_as_current_span(PREFIX + name, record_exception=False, set_status_on_exception=False) as made:
        one = Span(made)
        one.note(**attributes)
        try:
            yield one
        except Exception as error:
            one.failed(error)
            raise
        except BaseException:
            one.note(cancelled=True)
            raise
