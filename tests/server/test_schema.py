"""Requests made up from the server's own description: every one is answered, and none with an error of the server's."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from tests.engine.engine_helpers import reset

if TYPE_CHECKING:
    from omni_notebook.engine.async_omni import AsyncOmni
    from omni_notebook.server.serving import Server

schemathesis = pytest.importorskip("schemathesis", reason="only `make test-all` installs schemathesis")

EXAMPLES = 10
"""Of each operation and mode; one, where the machine was so slow that `MOST_S` have gone."""
MOST_S = 40.0
PATIENCE_S = 0.5
"""A client that leaves then ends its request: an audit of a thousand cycles is a request that fits."""
ENDLESS = "/v1/omni/events"
ANSWERS = {501, 503, 504, 507}
"""Of 500 and above; docs/server.md says when."""
MADE_UP = settings(
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_no_request_that_the_description_allows_or_almost_does_meets_an_error_of_the_servers_own(
    server: Server, engine: AsyncOmni
) -> None:
    described = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in described.get_all_operations()]
    asked: dict[str, set[int]] = {}
    ends_s = time.monotonic() + MOST_S
    for operation in operations:
        if operation.path != ENDLESS:
            asyncio.run(reset(engine))
            for mode in schemathesis.GenerationMode:
                asked.setdefault(operation.label, set()).update(answers(operation, mode, ends_s))
    assert len([label for label, met in asked.items() if met]) > 18, asked
    assert any(200 in found for found in asked.values())
    assert any(422 in found for found in asked.values())


def answers(operation: Any, mode: Any, ends_s: float) -> set[int]:
    """The status codes that made-up requests met."""
    import requests

    met = set()

    @settings(MADE_UP, max_examples=EXAMPLES if time.monotonic() < ends_s else 1)
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        try:
            response = case.call(timeout=PATIENCE_S)
        except requests.Timeout:
            return
        met.add(response.status_code)
        assert response.status_code < 500 or response.status_code in ANSWERS, (case.as_curl_command(), response.text)

    with contextlib.suppress(Unsatisfiable):  # where nothing is asked for, nothing can be asked for wrongly
        ask()
    return met
