"""A request over an upstream engine until upstream has it: how it is checked."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import msgspec
import pytest

from omni_notebook.errors import ArgumentError, OmniError, UpstreamError
from tests.engine.engine_helpers import collect
from tests.engine.upstream.upstream_helpers import calls, in_transit


async def refused(engine, kind: type[OmniError], words: str, **known) -> None:
    """It is told within its time, and no request of it is left."""
    async with asyncio.timeout(5):
        with pytest.raises(kind, match=words):
            await collect(engine, request_id="r", **known)
    assert in_transit(engine) == 0
    assert calls(engine, "generate") == []
    assert (await collect(engine, request_id="r"))[-1].finished


# ------------------------------------------------------------------------------------ checked


def test_what_upstreams_own_class_refuses_is_told_and_not_waited_for(engine):
    defaults = engine._core.upstream.default_sampling_params_list
    defaults[0] = msgspec.structs.replace(defaults[0], min_tokens=3)
    words = "min_tokens must be less than or equal to max_tokens=1, got 3"
    asyncio.run(refused(engine, ArgumentError, words, sampling_params={"max_tokens": 1}))


@pytest.mark.parametrize("asked", [{}, [], {"style": 3}], ids=str)
def test_what_is_no_adapter_is_refused_where_there_are_adapters(engine, style, asked):
    asyncio.run(engine.add_lora(style))
    asyncio.run(refused(engine, ArgumentError, "there is no LoRA adapter", lora_request=asked))


def test_an_error_that_nobody_foresaw_while_a_request_is_checked_is_its_clients(engine, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            "omni_notebook.engine.upstream.outputs.params_for", Mock(side_effect=LookupError("no stage table"))
        )
        with pytest.raises(UpstreamError, match="request r failed: LookupError: no stage table"):
            asyncio.run(asyncio.wait_for(collect(engine, request_id="r"), 5))
    assert asyncio.run(collect(engine, request_id="r"))[-1].finished
