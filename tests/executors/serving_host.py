"""A host that serves a whole engine where no vLLM is installed; only a host process imports this."""

from __future__ import annotations

from typing import Any

from omni_notebook import config
from omni_notebook.worker.reports import LoadReport
from omni_notebook.worker.vllm.wire import RankReply, packed
from tests.executors.talking_host import BareHost

config.has_vllm = lambda: True


class ServingHost(BareHost):
    """Gives each request its tokens; its one rank has done what it was ordered."""

    async def _ask(self, method: str, *_rest: Any) -> list[RankReply | None]:
        report = LoadReport(pid=1, device="cpu", device_name="none", weight_version="v", tags={"weights": 0})
        return [RankReply(0, 0, packed(report if method == "load" else None), None)]
