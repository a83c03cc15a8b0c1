"""The engine's own tests with a client of a server in the engine's place; its ranks are in the server's process."""

from __future__ import annotations

import pytest

from tests.engine.test_cancel_and_events import (  # noqa: F401
    test_a_sleep_cancelled_while_it_quiesces_is_rolled_back,
    test_status_never_waits_for_a_worker,
    test_submit_runs_a_call_from_a_plain_thread_and_its_future_cancels_it,
    test_subscribers_see_acks_states_memory_and_requests_in_order,
)
from tests.engine.test_lora import (  # noqa: F401
    make,
    test_a_request_for_an_adapter_that_is_not_there_starts_nothing,
    test_a_sleeping_stage_refuses_every_change_and_listing_works,
    test_an_adapter_changes_requests_that_name_it_and_no_other,
    test_an_adapter_that_fits_no_stage_names_the_first_layer_that_does_not_fit,
    test_outputs_name_the_adapter_that_had_a_part_in_them,
    test_the_same_adapter_again_is_no_change_and_another_needs_its_own_name_and_number,
)
from tests.engine.test_pause import (  # noqa: F401
    test_a_cancelled_pause_is_on_record_and_resume_helps,
    test_a_pause_that_times_out_stays_closed_refuses_sleep_and_can_be_retried,
    test_an_ar_stage_aborts_drains_or_freezes,
    test_bad_pauses_are_refused_before_a_gate_moves,
    test_control_calls_keep_working_while_paused,
    test_keep_delivers_the_running_batch_and_holds_the_queue,
    test_resume_during_a_pause_wins_and_the_pause_says_so,
)
from tests.engine.test_requests import (  # noqa: F401
    test_a_batch_that_fails_ends_its_requests_and_nobody_elses,
    test_a_cancelled_client_frees_its_place,
    test_a_client_that_gives_up_at_the_gates_does_not_end_anothers_request_of_its_id,
    test_a_client_that_goes_away_frees_its_place,
    test_a_closed_gate_holds_requests_until_it_opens_and_counts_them,
    test_a_request_gives_text_then_an_image,
    test_a_request_has_a_bound_if_the_client_wants_one,
    test_a_request_id_in_progress_is_refused,
    test_a_request_without_a_seed_reports_the_one_it_drew,
    test_a_text_request_ends_at_stage_0_and_needs_no_image_stage,
    test_a_wait_at_a_gate_has_a_bound,
    test_abort_ends_a_running_request_with_a_terminal_output,
    test_bad_requests_get_one_clear_line,
    test_closed_gates_refuse_at_once_and_name_the_call,
    test_many_requests_at_once_each_draw_what_they_draw_alone,
    test_the_same_seed_draws_the_same_bytes_and_another_does_not,
    test_token_ids_are_a_prompt_too,
)
from tests.engine.test_sleep_wake import (  # noqa: F401
    test_a_busy_stage_refuses_with_counts_and_keeps_serving,
    test_a_rank_that_fails_in_prepare_leaves_everything_as_it_was,
    test_a_wake_that_fails_leaves_the_stage_asleep_and_wakeable,
    test_an_ack_has_the_specifications_fields_and_all_metadata_keys,
    test_an_order_that_meets_a_transition_gives_up_at_its_own_deadline,
    test_bad_arguments_are_value_errors_and_change_nothing,
    test_both_stages_sleep_and_wake_and_draw_the_same_bytes,
    test_level_2_of_weights_written_in_memory_says_so_and_never_brings_back_old_ones,
    test_one_bad_stage_moves_none,
    test_raise_on_error_false_returns_the_answers,
    test_tags_wake_in_any_order_and_generate_waits_for_the_last,
    test_two_callers_of_one_stage_wait_for_each_other_and_both_get_an_answer,
    test_unknown_tags_are_refused,
)

pytestmark = pytest.mark.parametrize("shared_engine", ["uni"], indirect=True, scope="module")
