"""What every engine is besides its calls: something that a `with` ends, that a dashboard shows, that has a loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self, TypeVar

from omni_notebook.engine import views
from omni_notebook.engine.loop import EngineLoop, awaited

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Future
    from types import TracebackType

T = TypeVar("T")


class Scoped(ABC):
    """An engine that the end of its `with` or `async with` shuts down."""

    @abstractmethod
    def shutdown(self) -> None:
        """End it; idempotent."""

    def dashboard(self) -> Any:
        """A live view of this engine, shown by the cell that ends with it; `omni_notebook.dashboard(engine)`.

        Raises:
            UnsupportedError: the notebook extension is not loaded.
        """
        return views.open_view("dashboard", self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


class Looped(Scoped):
    """An engine of this process; `_loop` carries out its calls, whoever awaits them."""

    _loop: EngineLoop

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run one of this engine's coroutines from a plain thread; cancelling the future cancels the call.

        Raises:
            EngineClosedError: the engine was shut down.
        """
        return self._loop.submit(coroutine)

    async def _run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._loop.here:
            return await make()
        return await awaited(self._loop.submit(make()))
