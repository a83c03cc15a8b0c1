"""Orders and requests as OpenTelemetry spans; without its API, nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from omni_notebook.engine import tracing
from omni_notebook.errors import SleepError, StageBusyError
from tests.engine.engine_helpers import collect, fault, held, until


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch):
    """What is exported while a test runs, by a provider of its own."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    tracing._tracer.cache_clear()
    yield exporter
    provider.shutdown()
    tracing._tracer.cache_clear()


def named(exporter, name):
    """The finished spans of this name, oldest first."""
    return [span for span in exporter.get_finished_spans() if span.name == f"omni.{name}"]


def test_a_sleep_and_its_wake_are_spans_with_a_child_a_stage_that_say_what_was_freed(engine, spans):
    acks = asyncio.run(engine.sleep([0, 1]))
    asyncio.run(engine.wake_up([0]))
    (sleep,) = named(spans, "sleep")
    assert sleep.attributes["omni.stage_ids"] == (0, 1)
    assert sleep.attributes["omni.level"] == 1
    assert sleep.attributes["omni.task_id"] == acks[0].task_id
    assert sleep.attributes["omni.freed_bytes"] == sum(ack.freed_bytes for ack in acks) > 0
    assert sleep.status.status_code is StatusCode.UNSET
    stages = [span for span in named(spans, "stage") if span.parent.span_id == sleep.context.span_id]
    freed = {span.attributes["omni.stage_id"]: span.attributes["omni.freed_bytes"] for span in stages}
    assert freed == {ack.stage_id: ack.freed_bytes for ack in acks}
    assert {span.attributes["omni.state"] for span in stages} == {"ASLEEP"}
    (wake,) = named(spans, "wake")
    (woken,) = [span for span in named(spans, "stage") if span.parent.span_id == wake.context.span_id]
    assert woken.attributes["omni.state"] == "AWAKE"


def test_a_rank_that_fails_makes_its_orders_span_an_error_with_the_code(engine, spans):
    with fault(engine, 1, "prepare_sleep", RuntimeError("no room")), pytest.raises(SleepError):
        asyncio.run(engine.sleep([1]))
    (sleep,) = named(spans, "sleep")
    assert sleep.status.status_code is StatusCode.ERROR
    assert "no room" in sleep.status.description
    assert sleep.attributes["omni.ranks_failed"] == 1
    assert sleep.attributes["omni.error_code"]
    assert sleep.attributes["omni.freed_bytes"] == 0


def test_a_refused_sleep_is_a_span_with_the_refusals_code(engine, spans):
    async def busy() -> None:
        with held(engine, 1):
            running = asyncio.create_task(collect(engine))
            await until(lambda: engine.status().stages[1].running == 1)
            with pytest.raises(StageBusyError):
                await engine.sleep([1])
        await running

    asyncio.run(busy())
    (sleep,) = named(spans, "sleep")
    assert (sleep.status.status_code, sleep.attributes["omni.error_code"]) == (StatusCode.ERROR, "BUSY")


def test_a_request_is_one_span_however_many_tokens_it_has_and_belongs_to_the_callers_span(engine, spans):
    async def ask() -> tuple[int, int]:
        with trace.get_tracer("test").start_as_current_span("mine") as mine:
            outputs = await collect(engine, request_id="r1")
        return mine.context.span_id, len(outputs)

    mine, outputs = asyncio.run(ask())
    assert outputs > 1
    (request,) = named(spans, "request")
    assert request.parent.span_id == mine
    assert request.attributes["omni.request_id"] == "r1"
    assert (request.attributes["omni.stage_id"], request.attributes["omni.request_state"]) == (1, "finished")
    assert request.end_time > request.start_time


def test_a_pause_a_restart_and_new_weights_are_spans_and_a_look_at_the_status_is_none(engine, spans):
    async def orders() -> None:
        await engine.pause_generation(mode="keep")
        await engine.resume_generation()
        await engine.restart(1)
        engine.status()

    asyncio.run(orders())
    assert {span.name for span in spans.get_finished_spans()} == {"omni.pause", "omni.restart", "omni.stage"}
    assert named(spans, "pause")[0].attributes["omni.mode"] == "keep"


def test_without_the_api_orders_run_and_nothing_of_it_is_imported():
    script = textwrap.dedent("""
        import asyncio, sys
        class No:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "opentelemetry":
                    raise ImportError(name)
        sys.meta_path.insert(0, No())
        from omni_notebook.engine import tracing
        with tracing.span("sleep", level=1) as span:
            span.note(task_id="t")
            span.answered([])
        tracing.begun("request").end()
        print([name for name in sys.modules if "opentelemetry" in name])
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_api_is_not_imported_before_the_first_span():
    script = "import sys, omni_notebook.engine.async_omni; print('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
