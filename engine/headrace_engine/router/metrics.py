"""What the router counts, in a registry of its own. Gauges of groups are read from the fleet when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace_engine.core import Role
from headrace_engine.router.fleet import Fleet

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """All metrics of one router process. Names begin with `headrace_router_`."""

    def __init__(self, fleet: Fleet) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "headrace_router_requests",
            "Requests by how they ended: ok, refused (4xx), failed (5xx), deadline (504), "
            "broken (an error after the first byte), client_gone.",
            ["outcome"],
            registry=registry,
        )
        self.retries = Counter("headrace_router_retries", "Attempts after a request's first.", registry=registry)
        self.leg_failures = Counter(
            "headrace_router_leg_failures",
            "Legs that failed before the client had seen a byte, by the role at fault and the cause.",
            ["role", "cause"],
            registry=registry,
        )
        self.leg_seconds = Histogram(
            "headrace_router_leg_seconds",
            "Time from a leg's dispatch to its answer: `ticket` from decode, `prefill` until pushed.",
            ["leg"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_byte_seconds = Histogram(
            "headrace_router_time_to_first_byte_seconds",
            "Time from a request's arrival to the first byte of its answer, over all attempts; errors do not count.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.request_seconds = Histogram(
            "headrace_router_request_seconds",
            "Time from a request's arrival to the last byte of its answer.",
            buckets=_SECONDS,
            registry=registry,
        )
        registry.register(_FleetCollector(fleet))
        for leg in ("ticket", "prefill"):
            self.leg_seconds.labels(leg)

    def finished(self, outcome: str, seconds: float, first_byte_seconds: float | None) -> None:
        self.requests.labels(outcome).inc()
        self.request_seconds.observe(seconds)
        if first_byte_seconds is not None and outcome in ("ok", "broken"):
            self.first_byte_seconds.observe(first_byte_seconds)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


class _FleetCollector(Collector):
    """Gauges per group, made from the fleet on demand, so that a group that is gone has no series."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        ready = GaugeMetricFamily("headrace_router_ready_groups", "Groups that take new requests.", labels=["role"])
        for role in Role:
            ready.add_metric([role], self._fleet.num_ready(role))
        yield ready
        yield self._per_group("in_flight", "Legs on this group now.", lambda group: group["in_flight"])
        yield self._per_group(
            "cool_down_seconds",
            "Time left in which a group that could not be reached gets no request.",
            lambda group: group["cool_down_seconds"],
        )

    def _per_group(self, name: str, text: str, value: Callable[[dict[str, Any]], float]) -> Metric:
        metric = GaugeMetricFamily(f"headrace_router_{name}", text, labels=["role", "group"])
        for role, groups in self._fleet.snapshot().items():
            for group in groups:
                metric.add_metric([role, group["name"]], value(group))
        return metric
