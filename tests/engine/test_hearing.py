"""What a vLLM host says reaches the client who waits for it in the very turn of the engine's loop that heard it."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from omni_notebook import config
from omni_notebook.config import DEMO_FOLDER
from omni_notebook.engine.async_omni import AsyncOmni
from omni_notebook.engine.loop import Chime
from omni_notebook.executors import hosted
from omni_notebook.stages.vllm_replica import VllmReplica

if TYPE_CHECKING:
    import pytest

SERVING = "tests.executors.serving_host:ServingHost"


class Watch:
    """Notes, at each ring for news, whether the loop has turned since they were heard, and lets it turn no further."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.client_has_it = threading.Event()
        self.turned: list[bool] = []
        self.reached: list[bool] = []
        self._turned = False
        hear, ring = VllmReplica._hear, Chime.ring_now

        def heard(replica: VllmReplica, *said: Any) -> None:
            self._turned = False
            asyncio.get_running_loop().call_soon(self._turns)
            hear(replica, *said)

        def rings(chime: Chime) -> None:
            for_someone = bool(chime._bells)
            ring(chime)
            if for_someone:
                self.turned.append(self._turned)
                self.reached.append(self.client_has_it.wait(5))
                self.client_has_it.clear()

        patch.setattr(VllmReplica, "_hear", heard)
        patch.setattr(Chime, "ring_now", rings)

    def _turns(self) -> None:
        self._turned = True


def test_an_output_reaches_its_client_without_a_further_turn_of_the_engine_s_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(config, "has_vllm", lambda: True)
    monkeypatch.setattr(hosted, "warn_if_untested", lambda _version: None)
    monkeypatch.setattr(hosted, "HOST", SERVING)
    watch = Watch(monkeypatch)

    async def ask(engine: AsyncOmni) -> list[int]:
        prompt, params = {"prompt_token_ids": [1]}, {"max_tokens": 100}
        token_ids: list[int] = []
        async for out in engine.generate(prompt, sampling_params=params):
            token_ids = out.outputs[0].token_ids
            watch.client_has_it.set()
        return token_ids

    with AsyncOmni(str(DEMO_FOLDER / "thinker"), runtime="vllm") as engine:
        assert asyncio.run(ask(engine)) == list(range(100))
    *news, _end = zip(watch.turned, watch.reached, strict=True)  # at the end the request's parts are done with it first
    assert set(news) == {(False, True)}
