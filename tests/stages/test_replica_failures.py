"""Which rank's error a batch fails with, and whether the stage has failed with it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from omni_notebook.errors import DeadlineError, PeerLostError, WorkerDiedError
from omni_notebook.stages.replica import Replica

SILENT = DeadlineError("rank 0 did not answer 'execute' within 5 s")
LOST, DIED = PeerLostError("lost"), WorkerDiedError("died", stage_id=0, rank=1)
RAISED = ValueError("raised")


@pytest.mark.parametrize(
    ("errors", "cause", "failed"),
    [
        ([RAISED], RAISED, False),
        ([LOST, RAISED], RAISED, True),
        ([LOST, DIED, LOST], DIED, True),
        ([LOST, LOST], LOST, True),
        ([SILENT, RAISED], RAISED, True),
        ([SILENT, LOST, RAISED], RAISED, True),
        ([LOST, SILENT], SILENT, True),
        ([SILENT, DIED], DIED, True),
    ],
)
def test_a_batch_fails_by_the_rank_that_caused_it_and_lost_peers_fail_the_stage(errors, cause, failed):
    seen, failures = [], []
    replica = SimpleNamespace(
        scheduler=SimpleNamespace(fail=lambda batch, error: seen.append((batch, error))), _on_failure=failures.append
    )
    Replica._fail(replica, "batch", errors)
    assert seen == [("batch", cause)]
    assert failures == ([cause] if failed else [])
