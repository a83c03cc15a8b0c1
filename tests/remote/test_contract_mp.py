"""The engine's own tests with a client of a server in the engine's place; its ranks are processes, which can fail."""

from __future__ import annotations

import pytest

from tests.engine.test_cancel_and_events import (  # noqa: F401
    test_an_order_cancelled_at_any_point_ends_in_a_named_state,
)
from tests.engine.test_pause import (  # noqa: F401
    test_the_specifications_order_of_a_weight_update,
)
from tests.engine.test_requests import (  # noqa: F401
    test_a_batch_that_fails_ends_its_requests_and_nobody_elses,
    test_a_failed_stage_ends_its_clients_and_those_on_their_way_with_the_call_that_helps,
    test_a_request_gives_text_then_an_image,
    test_restart_serves_the_requests_that_waited,
)
from tests.engine.test_sleep_wake import (  # noqa: F401
    test_a_rank_that_fails_in_commit_takes_the_order_back,
    test_both_stages_sleep_and_wake_and_draw_the_same_bytes,
)

pytestmark = pytest.mark.parametrize("shared_engine", ["mp"], indirect=True, scope="module")
