"""Random interleavings of requests, aborts, pauses, resumes, sleeps, wakes, new weights: nothing lost, doubled, mixed.

`OMNI_TEST_INTERLEAVINGS=500` runs so many an executor, from the seed `OMNI_TEST_SEED` on (0); a failure names its seed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from omni_notebook.engine.async_omni import AsyncOmni
from tests.engine.interleaving import Interleaving, Known
from tests.engine.painting import SHIPPED

if TYPE_CHECKING:
    from pathlib import Path

IN_CI = 20
COUNT = int(os.environ.get("OMNI_TEST_INTERLEAVINGS", IN_CI))
FIRST = int(os.environ.get("OMNI_TEST_SEED", "0"))
ONE_S = 90.0
"""None takes longer, whatever its orders wait for."""

ENGINES: dict[str, dict[str, Any]] = {
    "uni": {"executor": "uni"},
    "mp, TP 2": {"executor": "mp", "tensor_parallel_size": 2},
}


@pytest.mark.timeout(max(300, COUNT * 12))
@pytest.mark.parametrize("kind", ENGINES)
def test_no_interleaving_loses_doubles_or_mixes_a_request_and_every_call_returns_in_time(
    kind: str, other_weights: Path
) -> None:
    known, counts = Known({"other": other_weights, "shipped": SHIPPED}), Counter[str]()
    with AsyncOmni("demo", **ENGINES[kind]) as engine:
        asyncio.run(known.learn(engine))
        began = time.monotonic()
        for seed in range(FIRST, FIRST + COUNT):
            one = Interleaving(engine, known, seed)
            try:
                asyncio.run(asyncio.wait_for(one.run(), ONE_S))
            except BaseException:
                print(f"OMNI_TEST_SEED={seed} ({kind})", *one.log.lines, engine.status(), sep="\n")
                raise
            counts += one.log.counts
        took = time.monotonic() - began
    print(f"{COUNT} interleavings on {kind}: {took / COUNT:.2f} s each")
    print(*(f"{n:6} {what}" for what, n in sorted(counts.items())), sep="\n")
    assert counts["generate finished"] > COUNT
    assert counts["load done"]
    assert counts["sleep done"]
    assert counts["pause done"]
