"""What a server writes is read as what was raised and made there."""

from __future__ import annotations

from typing import Any

import pytest

from omni_notebook import errors
from omni_notebook.engine.history import LIMIT, Filter
from omni_notebook.engine.remote.client import _given
from omni_notebook.engine.remote.decoding import error_of
from omni_notebook.engine.remote.history import HistoryThere, _Told
from omni_notebook.protocol import AckMetadata, EngineStatus, OmniACK, OmniSamplingParams

FAILED = OmniACK(
    task_id="t",
    status="ERROR",
    stage_id=0,
    rank=1,
    freed_bytes=0,
    metadata=AckMetadata(source="x").to_dict(),
    error_msg="no",
)
RAISED = [
    errors.ArgumentError("level=3: there are levels 1 and 2. Nothing changed"),
    errors.ConfigError("no such folder"),
    errors.UnsupportedError("not here"),
    errors.StepLevelError("single steps"),
    errors.StageBusyError("stage 1 is busy", stage_id=1, running=2, queued=3, in_transit=4),
    errors.AsleepError("stage 0 is ASLEEP; call wake_up([0])"),
    errors.PausedError("call resume_generation()"),
    errors.NeedsWeightsError("call load_weights(0, path)"),
    errors.StageFailedError("call restart(1)"),
    errors.SleepError("sleep failed", [FAILED]),
    errors.WakeError("wake failed", [FAILED]),
    errors.PauseError("the pause did not complete"),
    errors.LoRAError("no slot"),
    errors.DeadlineError("not within 3 s"),
    errors.OutOfMemoryError("no room", needed_bytes=9, free_bytes=3),
    errors.WorkerDiedError("rank 1 died", stage_id=1, rank=1, log_lines=["a", "b"]),
    errors.RemoteWorkerError("odd", type_name="OddError"),
    errors.LedgerError("not to be read"),
    errors.PeerLostError("left the group"),
    errors.ServerLostError("another server, behind that one"),
    errors.UpstreamError("its own words"),
    errors.EngineClosedError("shut down"),
]


class Served:
    """What an error's answer asks of an engine."""

    def status(self) -> EngineStatus:
        return EngineStatus(model="demo", closed=False, paused=False, uptime_s=0.0, stages=())


@pytest.mark.parametrize("raised", RAISED, ids=[type(error).__name__ for error in RAISED])
@pytest.mark.parametrize("order", [True, False])
def test_an_error_is_the_same_class_message_and_attributes_on_both_ends(raised: errors.OmniError, order: bool) -> None:
    from omni_notebook.server.answers import PYTHON_WORDS, problem

    token = PYTHON_WORDS.set(True)
    try:
        answer = problem(raised, Served(), order=order)
    finally:
        PYTHON_WORDS.reset(token)
    read = error_of(answer.status_code, bytes(answer.body), "POST x")
    assert (type(read), str(read)) == (type(raised), str(raised))
    assert vars(read) == vars(raised)


def test_every_class_has_its_case() -> None:
    named = {name for name, kind in vars(errors).items() if getattr(kind, "__module__", "") == errors.__name__}
    named = {name for name in named if isinstance(getattr(errors, name), type) and name[0] != "_"}
    assert {type(error).__name__ for error in RAISED} == named - {"OmniError"}


NO_SUCH_CALL = "the server has no such call (an older version?); nothing was changed there"


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (503, b'{"error": {"message": "too many bodies", "code": "BUSY"}}', errors.OmniError, "too many bodies"),
        (
            503,
            b'{"error": {"message": "the server ended", "code": "ENDED"}}',
            errors.EngineClosedError,
            "the server ended",
        ),
        (409, b'{"error": {"message": "it was ended", "code": "ABORTED"}}', errors.OmniError, "it was ended"),
        (404, b'{"detail": "Not Found"}', errors.UnsupportedError, f"POST x answered 404: {NO_SUCH_CALL}"),
        (
            405,
            b'{"error": {"message": "m", "code": "HTTP"}}',
            errors.UnsupportedError,
            f"POST x answered 405: {NO_SUCH_CALL}",
        ),
        (404, b'{"error": {"message": "no such model", "code": 404}}', errors.UnsupportedError, "no such model"),
        (500, b"<html>bad gateway</html>", errors.OmniError, "POST x answered 500: <html>bad gateway</html>"),
        (502, b"", errors.OmniError, "POST x answered 502: nothing more was said"),
        (422, b'{"error": {"message": "no", "code": 422}}', errors.ArgumentError, "no"),
    ],
)
def test_other_answers_say_what_came(status: int, body: bytes, kind: type[Exception], message: str) -> None:
    read = error_of(status, body, "POST x")
    assert (type(read), str(read)) == (kind, message)


def test_a_code_that_is_not_known_stays_with_the_error() -> None:
    read: Any = error_of(409, b'{"error": {"message": "m", "code": "ABORTED", "details": {"_x": 1, "y": 2}}}', "POST x")
    assert (read.error_code, vars(read)) == ("ABORTED", {"y": 2, "error_code": "ABORTED"})


@pytest.mark.parametrize(("name", "kind"), [("RuntimeError", RuntimeError), ("SystemExit", errors.RemoteWorkerError)])
def test_what_a_rank_raised_is_pythons_own_error_but_never_one_that_ends_a_process(name: str, kind: type) -> None:
    body = b'{"error": {"message": "bad kernel", "code": "%b", "details": {"type_name": "%b"}}}'
    read = error_of(500, body % (name.encode(), name.encode()), "POST x")
    assert (type(read), str(read)) == (kind, "bad kernel")


SAID = [
    (None, None),
    ({}, {}),
    ({"temperature": 0.0, "max_tokens": 256}, {"temperature": 0.0, "max_tokens": 256}),
    (OmniSamplingParams(), {}),
    (OmniSamplingParams(seed=3), {"seed": 3}),
    (OmniSamplingParams(seed=0, top_k=5, temperature=0.0), {"seed": 0, "top_k": 5}),
    (OmniSamplingParams(stop_token_ids=(7,), width=64), {"width": 64, "stop_token_ids": (7,)}),
]


@pytest.mark.parametrize(("params", "said"), SAID)
def test_of_the_typed_parameters_what_was_said_is_sent(params: Any, said: dict[str, Any] | None) -> None:
    assert _given(params) == said


WRONG: list[Any] = [{"top_k": 1.5}, {"max_tokens": 0}, {"colour": 1}, OmniSamplingParams(max_tokens=0)]


@pytest.mark.parametrize("wrong", WRONG)
def test_parameters_that_do_not_fit_are_refused_before_anything_is_sent(wrong: Any) -> None:
    with pytest.raises(errors.ArgumentError):
        _given(wrong)


@pytest.mark.parametrize(("complete", "more"), [(True, "all"), (False, "the newest 10,000; --since and --stage reach")])
def test_a_history_says_what_of_a_servers_it_has(complete: bool, more: str) -> None:
    acks: Any = [None] * (LIMIT + 1)
    there = HistoryThere(_Told("ledger.db", complete, True, acks), "http://gpu-7:8000", Filter())
    assert there.title.startswith(
        f"the newest {LIMIT} ACKs are shown, there are more: to_dataframe(), to_csv(path) and"
    )
    assert f"--csv FILE take {more}" in there.title
