"""The host process, for tests that call what no stage calls: `AsyncLLM` itself, behind our back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_notebook.worker.vllm.host import VllmHost

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from concurrent.futures import Future

ASKING = "tests.vllm.asking_host:AskingHost"


class AskingHost(VllmHost):
    """Passes calls on."""

    def ask_vllm(self, method: str, arguments: list[Any]) -> Future[Any]:
        """What a method of `AsyncLLM` gives, as plain types."""
        return self._go(_plain(getattr(self._llm, method)(*arguments)))


async def _plain(work: Coroutine[Any, Any, Any]) -> Any:
    answer = await work
    return sorted(answer) if isinstance(answer, set) else answer
