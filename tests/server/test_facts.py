"""What a client that speaks Python needs of a server: the engine's words, its errors' attributes, logs, who serves."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import TYPE_CHECKING, Any

import omni_notebook
from omni_notebook.errors import (
    LedgerError,
    OutOfMemoryError,
    RemoteWorkerError,
    SleepError,
    StageBusyError,
    WorkerDiedError,
)
from omni_notebook.protocol import AckMetadata, OmniACK
from tests import adapters
from tests.engine.engine_helpers import PROMPT, collect, slow, until

if TYPE_CHECKING:
    from pathlib import Path

    import httpx
    import pytest

    from omni_notebook.engine.async_omni import AsyncOmni

PYTHON = {"X-Omni-Words": "python"}


def test_messages_are_in_requests_or_in_python_calls_as_the_client_reads(http: httpx.Client) -> None:
    http.post("/v1/omni/sleep", json={"stage_ids": [0]})
    body = {"prompt": PROMPT}
    ours = http.post("/v1/omni/generate", json=body).json()["error"]["message"]
    theirs = http.post("/v1/omni/generate", json=body, headers=PYTHON).json()["error"]["message"]
    assert ours == 'stage 0 is ASLEEP (level 1); send POST /v1/omni/wakeup {"stage_ids": [0]} to open it'
    assert theirs == "stage 0 is ASLEEP (level 1); call wake_up([0]) to open it"
    assert http.post("/v1/omni/generate", json=body).json()["error"]["message"] == ours


def test_a_busy_stage_tells_how_busy_it_is(http: httpx.Client, engine: AsyncOmni) -> None:
    async def scenario() -> None:
        request = asyncio.create_task(collect(engine, sampling_params={"num_inference_steps": 400}, request_id="long"))
        await until(lambda: engine.status().stages[1].running)
        busy = await asyncio.to_thread(http.post, "/v1/omni/sleep", json={"stage_ids": [1]}, headers=PYTHON)
        await engine.abort("long")
        await request
        assert busy.status_code == 409
        error = busy.json()["error"]
        assert error["code"] == StageBusyError.error_code
        assert error["details"] == {"stage_id": 1, "running": 1, "queued": 0, "in_transit": 0}
        assert "help" not in busy.json()

    asyncio.run(scenario())


def test_an_errors_attributes_are_its_details_and_its_acks_are_acks(
    http: httpx.Client, engine: AsyncOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    ack = OmniACK(
        task_id="t", status="ERROR", stage_id=0, rank=0, freed_bytes=0, metadata=AckMetadata(source="x").to_dict()
    )
    remote = RemoteWorkerError("rank 0 raised Odd", type_name="Odd")
    remote.remote_traceback = "Traceback …"
    died = WorkerDiedError("rank 1 died", stage_id=1, rank=1, log_lines=["a", "b"])
    died.thing = object()
    cases = [
        (OutOfMemoryError("no room", needed_bytes=9, free_bytes=3), 507, {"needed_bytes": 9, "free_bytes": 3}),
        (died, 500, {"stage_id": 1, "rank": 1, "log_lines": ["a", "b"]}),
        (remote, 500, {"type_name": "Odd", "remote_traceback": "Traceback …"}),
        (SleepError("rank 0 did not", [ack]), 500, None),
    ]
    for error, status, details in cases:

        async def failing(stage_id: int, timeout: float | None, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(engine, "restart", failing)
        answer = http.post("/v1/omni/restart", json={"stage_id": 0})
        assert (answer.status_code, answer.json()["error"].get("details")) == (status, details)
        assert answer.json()["error"]["code"] == error.error_code
        assert [one["task_id"] for one in answer.json().get("acks", [])] == (["t"] if details is None else [])


def test_logs_are_the_ranks_own(http: httpx.Client, engine: AsyncOmni) -> None:
    assert http.get("/v1/omni/logs?stage_id=1&rank=1").json() == {"lines": engine.logs(1, 1)}
    assert http.get("/v1/omni/logs?stage_id=0").json() == {"lines": []}
    wrong = http.get("/v1/omni/logs?stage_id=1&rank=2")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (422, "BAD_ARGUMENT")
    assert "query.stage_id: Field required" in http.get("/v1/omni/logs").json()["error"]["message"]


def test_an_adapter_is_used_and_pinned_by_its_number(http: httpx.Client, engine: AsyncOmni, tmp_path: Path) -> None:
    tensors = adapters.matrices(engine._core.stages[0].model.adaptable)
    path = str(adapters.write(tmp_path / "inked", tensors))
    http.post("/v1/omni/loras", json={"lora_name": "inked", "lora_int_id": 3, "lora_path": path})
    try:
        for named in (3, "inked"):
            body = {"prompt": PROMPT, "output_modalities": ["text"], "lora_request": named}
            assert '"lora":"inked"' in http.post("/v1/omni/generate", json=body).text
        assert http.post("/v1/omni/loras/3/pin").json() == {"status": "SUCCESS", "pinned": True}
        assert [lora.pinned for lora in engine.status().stages[0].loras] == [True]
    finally:
        http.delete("/v1/omni/loras/3")
    absent = http.post("/v1/omni/loras/3/pin", headers=PYTHON)
    assert absent.status_code == 422
    assert "there is no adapter 3; adapters are: none; call add_lora(request)" in absent.json()["error"]["message"]


def test_an_order_for_another_engine_is_refused_and_changes_nothing(http: httpx.Client, engine: AsyncOmni) -> None:
    name = http.get("/v1/omni/status").headers["X-Omni-Engine"]
    meant = {"X-Omni-Engine": "7.0@elsewhere"}
    refused = http.post("/v1/omni/sleep", json={"stage_ids": [0]}, headers=meant)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "OTHER_ENGINE")
    assert refused.json()["error"]["message"] == (
        f"this was meant for the engine 7.0@elsewhere; {name} answers here now. Nothing was changed"
    )
    assert engine.status().stages[0].state == "AWAKE"
    assert http.get("/v1/omni/status", headers=meant).status_code == 200  # whoever looks may look
    assert http.post("/v1/omni/resume", headers={"X-Omni-Engine": name}).status_code == 200


def test_the_history_is_the_ledgers_newest_first(
    http: httpx.Client, engine: AsyncOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(**query: object) -> list[dict[str, Any]]:
        answer = http.get("/v1/omni/history", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()["acks"]

    acks = http.post("/v1/omni/sleep", json={"stage_ids": ["painter"]}).json()["acks"]
    http.post("/v1/omni/wakeup", json={})
    past = told(stage="painter", session="this", limit=4)
    assert [(one["order"], one["stage_id"]) for one in past] == [("wake", 1)] * 2 + [("sleep", 1)] * 2
    assert {one["task_id"] for one in past[2:]} == {acks[0]["task_id"]}
    assert {one["rank"] for one in told(stage=1, rank=1)} == {1}
    assert told(since=time.time() + 60) == told(since="2999-01-01") == []
    for query in ({"stage": "nobody"}, {"since": "soon"}, {"limit": 0}, {"session": "x"}, {"rank": "-1"}):
        assert http.get("/v1/omni/history", params=query).status_code == 422, query
    monkeypatch.setenv("OMNI_NOTEBOOK_LEDGER", "off")
    refused = http.get("/v1/omni/history")
    assert (refused.status_code, refused.json()["error"]["code"]) == (501, LedgerError.error_code)
    assert "no history is kept" in refused.json()["error"]["message"]


def test_whether_an_order_is_under_way_is_told_by_its_name(http: httpx.Client, engine: AsyncOmni) -> None:
    named = {"X-Omni-Order": "abc"}

    def under_way() -> bool:
        return bool(http.get("/v1/omni/version", headers=named).json()["order"])

    async def scenario() -> None:
        with slow(engine, 1, 0.5, "prepare_sleep"):
            order = asyncio.create_task(
                asyncio.to_thread(http.post, "/v1/omni/sleep", json={"stage_ids": [1]}, headers=named)
            )
            await until(lambda: engine.status().stages[1].state == "FALLING_ASLEEP")
            assert await asyncio.to_thread(under_way)
            again = {"url": "/v1/omni/abort", "json": {"request_id": "none"}, "headers": named}
            assert (await asyncio.to_thread(http.post, **again)).status_code == 200
            assert await asyncio.to_thread(under_way)  # the first of this name still is
            assert (await order).status_code == 200
        assert not await asyncio.to_thread(under_way)

    assert not under_way()
    asyncio.run(scenario())
    assert http.post("/v1/omni/sleep", json={"level": 3}, headers=named).status_code == 422
    assert not under_way()


def test_the_version_says_who_serves_and_where(http: httpx.Client) -> None:
    answer = http.get("/v1/omni/version")
    name = answer.headers["X-Omni-Engine"]
    assert name.partition(".")[0] == str(os.getpid())
    assert answer.json() == {
        "name": "omni-notebook",
        "version": omni_notebook.__version__,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "engine": name,
    }
