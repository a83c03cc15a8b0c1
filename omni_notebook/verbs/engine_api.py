"""The engine as verbs see it: every engine of this package answers these calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Coroutine
    from concurrent.futures import Future

    from omni_notebook.engine.history import History
    from omni_notebook.protocol import EngineStatus, Event, LoRARequest, OmniACK, OmniRequestOutput

_T = TypeVar("_T")


class Subscription(Protocol):
    """An async iterator of an engine's events; it ends with the engine."""

    def __aiter__(self) -> AsyncIterator[Event]:
        """Itself."""

    def close(self) -> None:
        """End it, from any thread."""


class Engine(Protocol):
    """The part of `AsyncOmni` that verbs call; the coroutines run through `submit`."""

    @property
    def url(self) -> str | None:
        """The server that answers for it; None: it is in this process."""

    @property
    def host(self) -> str | None:
        """The machine that its ranks are on; None: this one."""

    async def sleep(
        self,
        stage_ids: list[int] | None = None,
        level: int = 1,
        mode: str | None = None,
        timeout: float | None = None,
        *,
        discard: bool = False,
        raise_on_error: bool = True,
    ) -> list[OmniACK]:
        """Put stages to sleep."""

    async def wake_up(
        self,
        stage_ids: list[int] | None = None,
        tags: list[str] | None = None,
        reload: bool = True,
        timeout: float | None = None,
        *,
        raise_on_error: bool = True,
    ) -> list[OmniACK]:
        """Wake stages."""

    async def pause_generation(
        self,
        mode: str = "abort",
        stage_ids: list[int] | None = None,
        wait_for_inflight_requests: bool = False,
        clear_cache: bool = True,
        timeout: float | None = None,
    ) -> None:
        """Close admission, and with "keep" the schedulers."""

    async def resume_generation(self, stage_ids: list[int] | None = None) -> None:
        """Open again what a pause closed."""

    async def restart(self, stage_id: int) -> None:
        """Start a stage's workers anew."""

    async def load_weights(
        self, stage_id: int, source: str, version: str | None = None, timeout: float | None = None
    ) -> None:
        """Load a checkpoint folder into a stage."""

    async def add_lora(
        self, request: LoRARequest, stage_ids: list[int] | None = None, timeout: float | None = None
    ) -> bool:
        """Add an adapter; whether it was not there yet."""

    async def remove_lora(self, lora_int_id: int, timeout: float | None = None) -> bool:
        """Remove an adapter; whether it was there."""

    async def pin_lora(self, lora_int_id: int, timeout: float | None = None) -> bool:
        """Keep an adapter in its slot."""

    async def abort(self, request_id: str) -> bool:
        """End a request; whether it was in progress."""

    def generate(
        self,
        prompt: str | dict[str, Any],
        request_id: str | None = None,
        sampling_params: dict[str, Any] | None = None,
        *,
        output_modalities: list[str] | None = None,
        admission_timeout: float = 60.0,
        lora_request: int | None = None,
    ) -> AsyncIterator[OmniRequestOutput]:
        """Outputs of one request."""

    async def record_audit(self, verdict: str, report: Any) -> None:
        """Put an audit on record."""

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run a coroutine on the engine's loop, from any thread."""

    def logs(self, stage_id: int, rank: int = 0, replica: int = 0) -> list[str]:
        """The last lines that a rank's process wrote."""

    def status(self) -> EngineStatus:
        """A snapshot."""

    def subscribe(self) -> Subscription:
        """Events from now on: ACKs, state changes, memory samples, request progress."""

    def shutdown(self) -> None:
        """Give everything back."""


class ServedEngine(Engine, Protocol):
    """An engine with a `url`: what must be done beside its ranks is done there."""

    @property
    def closed(self) -> bool:
        """Whether this end was shut down; the server is not asked."""

    @property
    def in_this_process(self) -> bool:
        """Whether the server is a thread of this very process."""

    def history(
        self,
        stage: int | None = None,
        rank: int | None = None,
        since: float | None = None,
        session: int | Literal["this"] | None = None,
        errors: bool = False,
        limit: int | None = None,
    ) -> History:
        """Past ACKs in the server's own ledger."""

    @property
    def news(self) -> tuple[str, ...]:
        """Lines that a person should know of the engine there, as far as was heard; nobody is asked."""

    def told(self, lines: Collection[str]) -> None:
        """A person has seen these: orders are for the engine that is there now."""

    async def audit_there(
        self, body: dict[str, Any], told: Callable[[str, float | None], None] | None = None
    ) -> dict[str, Any]:
        """Audit it there; `body` and answer as `POST /v1/omni/audit` has them, `told` hears how far it is."""
