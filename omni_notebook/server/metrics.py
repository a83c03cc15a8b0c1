"""`/metrics` for Prometheus: orders as their ACKs told, memory and load as the status tells when it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from omni_notebook.protocol import AckEvent, MemoryState, PauseState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from omni_notebook.protocol import OmniACK, RankStatus, StageStatus
    from omni_notebook.verbs.engine_api import Engine

PREFIX = "omni"
BUCKETS_S = (*(n * 10.0**power for power in (-3, -2, -1, 0) for n in (1, 2, 3, 5, 7)), 10, 20, 30, 60, 120, 300)
"""1 ms to 5 min, five to a decade: a regression of a third is seen."""
_RANK = ("stage", "replica", "rank")
_WHERE = """\
Requests of a stage: running and queued in it, in transit to it from an earlier one, at a gate of any that they need. \
vLLM-Omni does not tell where one is: all that are in progress are in transit on every stage."""


class Metrics:
    """One engine's figures, in a registry of their own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.registry = CollectorRegistry()
        self._orders = Counter(
            "orders", "ACKs of ranks.", ("order", "status", "noop", *_RANK), namespace=PREFIX, registry=self.registry
        )
        self._freed = Counter(
            "freed_bytes",
            "Device memory that sleeps gave back, measured.",
            _RANK,
            namespace=PREFIX,
            registry=self.registry,
        )
        self._latency = Histogram(
            "order_seconds",
            "What an order took on a rank; orders that had nothing to do are not counted.",
            ("order", *_RANK),
            namespace=PREFIX,
            registry=self.registry,
            buckets=BUCKETS_S,
        )
        self.registry.register(_Snapshot(engine))

    async def follow(self) -> None:
        """Count every ACK from now on, until the engine ends."""
        subscription = self._engine.subscribe()
        try:
            async for event in subscription:
                if isinstance(event, AckEvent):
                    self._count(event.order, event.ack)
        finally:
            subscription.close()

    def _count(self, order: str, ack: OmniACK) -> None:
        rank = (str(ack.stage_id), str(ack.metadata["replica"]), str(ack.rank))
        noop = bool(ack.metadata["noop"])
        self._orders.labels(order, ack.status, str(noop).lower(), *rank).inc()
        self._freed.labels(*rank).inc(ack.freed_bytes)
        if not noop and ack.metadata["latency_ms"] is not None:
            self._latency.labels(order, *rank).observe(ack.metadata["latency_ms"] / 1e3)

    def text(self) -> bytes:
        """All figures, in Prometheus's text format."""
        return generate_latest(self.registry)


class _Snapshot(Collector):
    """Gauges from the engine's status, read when they are asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> Iterator[Metric]:
        """No names before the first collection."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        status = self._engine.status()
        yield GaugeMetricFamily(
            f"{PREFIX}_up", "0 once the engine was shut down; it has no stages then.", float(not status.closed)
        )
        if status.closed:
            return
        stages = status.stages
        yield from (_states(stages), _pauses(stages), _requests(stages), _tags(stages))
        yield _each_rank(stages, "process_bytes", "Memory of the rank's process on its device, or its RSS.")
        yield _each_rank(stages, "host_backup_bytes", "Host memory and files that a level 1 wakes from.")


def _states(stages: tuple[StageStatus, ...]) -> Metric:
    gauge = GaugeMetricFamily(
        f"{PREFIX}_stage_state", "1 for the memory state that a stage is in.", labels=("stage", "state")
    )
    for stage in stages:
        for state in MemoryState:
            gauge.add_metric((str(stage.stage_id), str(state)), float(stage.state is state))
    return gauge


def _pauses(stages: tuple[StageStatus, ...]) -> Metric:
    gauge = GaugeMetricFamily(f"{PREFIX}_stage_paused", "1 where a pause holds a stage.", labels=("stage",))
    for stage in stages:
        gauge.add_metric((str(stage.stage_id),), float(stage.pause_state is not PauseState.OPEN))
    return gauge


def _requests(stages: tuple[StageStatus, ...]) -> Metric:
    gauge = GaugeMetricFamily(f"{PREFIX}_requests", _WHERE, labels=("stage", "where"))
    for stage in stages:
        places = {
            "running": stage.running,
            "queued": stage.queued,
            "transit": stage.in_transit,
            "gate": stage.waiting_at_gate,
        }
        for where, count in places.items():
            gauge.add_metric((str(stage.stage_id), where), count)
    return gauge


def _tags(stages: tuple[StageStatus, ...]) -> Metric:
    gauge = GaugeMetricFamily(
        f"{PREFIX}_resident_bytes", "Device memory of a rank by tag, physically there.", labels=(*_RANK, "tag")
    )
    for stage, rank in _ranks(stages):
        for tag, memory in rank.tags.items():
            gauge.add_metric((*_labels(stage, rank), tag), memory.resident_bytes)
    return gauge


def _each_rank(stages: tuple[StageStatus, ...], name: str, about: str) -> Metric:
    gauge = GaugeMetricFamily(f"{PREFIX}_{name}", about, labels=_RANK)
    for stage, rank in _ranks(stages):
        value = getattr(rank, name)
        if value is not None:
            gauge.add_metric(_labels(stage, rank), value)
    return gauge


def _ranks(stages: tuple[StageStatus, ...]) -> Iterator[tuple[StageStatus, RankStatus]]:
    return ((stage, rank) for stage in stages for rank in stage.ranks)


def _labels(stage: StageStatus, rank: RankStatus) -> tuple[str, str, str]:
    return str(stage.stage_id), str(rank.replica), str(rank.rank)
