"""Tensors into two replicas of two ranks: each takes its slice, and none keeps what one could not take."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from omni_notebook.errors import ConfigError, NeedsWeightsError
from omni_notebook.stages import tensor_source
from tests.engine.engine_helpers import golden, rank_fault
from tests.engine.faults import CULPRIT, PLACES, STAGE, goldens, learn, places, serves, state_of
from tests.engine.weights_helpers import FOLDERS, others, replaced, saved, stream, version

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from omni_notebook.engine.async_omni import AsyncOmni

KIB = 1024


@pytest.fixture
def ranks(four: AsyncOmni) -> Iterator[AsyncOmni]:
    """Two replicas of two ranks a stage."""
    yield four
    if state_of(four) in {"AWAKE", "NEEDS_WEIGHTS"}:
        asyncio.run(four.load_weights(STAGE, FOLDERS[STAGE]))


@pytest.mark.parametrize("chunk_bytes", [16 * 1024 * KIB, 64 * KIB], ids=["one chunk", "many chunks"])
def test_every_rank_of_every_replica_takes_its_slice(
    ranks: AsyncOmni, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(tensor_source, "CHUNK_BYTES", chunk_bytes)

    async def run() -> None:
        await ranks.load_weights(STAGE, saved(others(), tmp_path / "other"))
        by_path = version(ranks), await golden(ranks)
        await ranks.load_weights(STAGE, FOLDERS[STAGE])
        assert await golden(ranks) == goldens[id(ranks)]
        await ranks.load_weights(STAGE, stream(others()))
        assert (version(ranks), await golden(ranks)) == by_path
        both = await asyncio.gather(*(golden(ranks) for _ in range(4)))  # on both replicas
        assert {tuple(tokens) for tokens, _picture in both} == {tuple(by_path[1][0])}
        acks = await ranks.sleep([STAGE], level=1)
        assert places(acks) == PLACES
        assert {ack.metadata["weight_version"] for ack in acks} == {by_path[0]}
        await ranks.wake_up([STAGE])
        assert await golden(ranks) == by_path[1]

    asyncio.run(run())


@pytest.mark.parametrize("method", ["prepare_tensors", "load_tensors", "finish_tensors", "set_weight_version"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_one_of_four_ranks_that_fails_leaves_no_mix(ranks: AsyncOmni, method: str, after: bool) -> None:
    """All ranks but one have the new weights, or all: none may keep them unless all are named alike."""

    async def run() -> None:
        before = version(ranks)
        what = {"error": "OSError", "args": [5, "the disk failed"], "after": after}
        wanted = OSError if method == "prepare_tensors" else NeedsWeightsError
        with (
            rank_fault(ranks, STAGE, CULPRIT, method, **what),
            pytest.raises(wanted, match="the disk failed") as caught,
        ):
            await ranks.load_weights(STAGE, others())
        if wanted is NeedsWeightsError:
            assert state_of(ranks) == "NEEDS_WEIGHTS"
            if method != "set_weight_version":
                assert "rank 1 of replica 1 of stage 1 got new weights only in part" in str(caught.value)
            await serves(ranks)
            await ranks.wake_up([STAGE])
        assert (state_of(ranks), version(ranks)) == ("AWAKE", before)
        assert await golden(ranks) == goldens[id(ranks)]

    asyncio.run(run())


def test_a_mapping_that_does_not_fit_one_model_of_four_ranks_changes_none(ranks: AsyncOmni) -> None:
    async def run() -> None:
        with pytest.raises(ConfigError, match=r"blocks\.0\.q\.weight has shape"):
            await ranks.load_weights(STAGE, replaced("blocks.0.q.weight", others()["blocks.0.q.weight"][:64]))
        assert state_of(ranks) == "AWAKE"
        assert await golden(ranks) == goldens[id(ranks)]

    asyncio.run(run())


def test_four_ranks_restart_without_weights_that_no_path_has(ranks: AsyncOmni) -> None:
    async def run() -> None:
        await ranks.load_weights(STAGE, stream(others()), version="mine")
        mine = await golden(ranks)
        await ranks.restart(STAGE)
        await learn(ranks)
        assert (state_of(ranks), version(ranks)) == ("NEEDS_WEIGHTS", None)
        await ranks.load_weights(STAGE, stream(others()), version="mine")
        assert (state_of(ranks), version(ranks), await golden(ranks)) == ("AWAKE", "mine", mine)

    asyncio.run(run())
