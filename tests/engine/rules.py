"""The rules of pausing, one a sentence of the specification's "Quiescing a busy diffusion stage" or of issue 4.

Each stands in our words. `@pytest.mark.rule(Rule.X)` says that a test proves it; `tools/pause_rules.py` prints all.
"""

from __future__ import annotations

from enum import Enum

BULLETS, ORDER, MATRIX, NOTES = "keep", "weight update", "matrix", "notes"
BARRIER, AUTOREGRESSIVE, STATES = "barrier", "AR stage", "pause states"


class Rule(Enum):
    """Where a rule comes from, and the rule."""

    # ------------------------------------------------------- the section's opening and its bullets
    MADE_QUIET_FIRST = BULLETS, "a stage with requests that nobody has quiesced refuses to sleep"
    ABORT_DISCARDS = BULLETS, "a sleep that aborts discards the running batch, one that keeps delivers it"
    FINISHES = BULLETS, "the running batch finishes on the weights it started with and is delivered"
    STAY_QUEUED = BULLETS, "requests that have not started stay queued and run after the resume"
    NEW_WEIGHTS = BULLETS, "requests that waited run on whatever weights are loaded by then"
    NEVER_ACROSS = BULLETS, "no request denoises across a weight change"
    EVERY_REPLICA = BULLETS, "the pause returns after every rank of every replica has acknowledged"
    AT_THE_BOUNDARY = BULLETS, "the acknowledgement comes at the next batch boundary"
    CONTROL_CALLS = BULLETS, "list_loras, sleep, wake_up, resume_generation and status work while paused"

    # --------------------------------------------------------------------------- the weight update
    UPDATE = ORDER, "pause keep, sleep, wake, new weights, resume: in this order it works"
    WAKE_IS_NO_RESUME = ORDER, "a wake does not lift the pause: admission stays closed until the resume"

    # ---------------------------------------------------------------------------------- the matrix
    ON_UNI = MATRIX, "request-level execution on the `uni` executor"
    ON_MP = MATRIX, "request-level execution on the `mp` executor, with asynchronous output"
    WITH_PREFETCH = MATRIX, "request-level execution with asynchronous prefetch"
    STEP_LEVEL = MATRIX, "step-level execution"
    FRONTEND_ONLY = MATRIX, "abort, wait, wait_for_inflight_requests on a diffusion stage"

    # ------------------------------------------------------------------------------- behaviour notes
    STOPS_THE_BACKEND = NOTES, "keep on a diffusion stage stops its scheduler and waits; it does not return at once"
    FAILED_STAYS_CLOSED = NOTES, "after a timeout or an error the scheduler stays closed"
    RETRY_OR_RESUME = NOTES, "after a failed pause a retry or a resume helps"
    NO_SLEEP_AFTER_FAILURE = NOTES, "after a failed pause sleep and weight changes are refused"
    PARTIAL_RESUME = NOTES, "a resume that leaves a paused stage closed leaves admission closed"
    LAST_RESUME = NOTES, "admission opens when the last paused stage is resumed"
    CLEAR_CACHE = NOTES, "clear_cache changes nothing on a diffusion stage"
    UNUSED = NOTES, "without a pause call no barrier runs; batches, aborts and the order of outputs are as before"

    # ---------------------------------------------------------------------- issue 4, item 1: barrier
    EVERY_STEP = BARRIER, "every output tells the weight version of each of its denoise steps"
    AFTER_THE_COPIES = BARRIER, "the acknowledgement comes after the copies of the outputs, which are handed over"
    ORDERS_AFTER = BARRIER, "a control order given after the pause runs after the batch's outputs were handed over"
    JOINS_PREFETCH = BARRIER, "the acknowledgement comes after the prefetches that were on their way"

    # -------------------------------------------------------------------- issue 4, item 4: AR stages
    AR_ABORT = AUTOREGRESSIVE, "abort ends every request of an AR stage with what it has"
    AR_WAIT = AUTOREGRESSIVE, "wait lets every request of an AR stage end, then stops it"
    AR_KEEP = AUTOREGRESSIVE, "keep freezes the requests of an AR stage; after the resume they go on token for token"
    AR_SLEPT = AUTOREGRESSIVE, "frozen requests of an AR stage that slept are computed again, token for token"
    AR_CLEAR_CACHE = AUTOREGRESSIVE, "clear_cache gives up an AR stage's keys and values, without it they stay"

    # ------------------------------------------------------------------ issue 4, item 5: pause states
    GLOBAL_GATE = STATES, "while any stage is PAUSING, PAUSED or PAUSE_FAILED nothing is admitted"
    ALL_OR_NONE = STATES, "all named stages are checked before any is paused"
    INFLIGHT = STATES, "wait_for_inflight_requests=True is mode='wait'"
    SAME_TWICE = STATES, "two equal pauses are one"
    OTHER_MODE = STATES, "a pause in another mode takes over; a kept diffusion stage stays kept"
    RESUME_WINS = STATES, "a resume during a pause wins at once, and the pause says so"
    CANCELLED = STATES, "a cancelled pause is on record, closed, and helped by a retry or a resume"
    ABORT_WHILE_PAUSED = STATES, "an abort of a queued request while paused gives its client an end"
    COUNTED = STATES, "requests that arrive while paused are counted, and run after the resume"

    def __init__(self, source: str, text: str) -> None:
        self.source = source
        self.text = text
