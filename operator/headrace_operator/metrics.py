"""The operator's own metrics, all named `headrace_operator_*`; docs/operations.md tells what to watch for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from headrace_operator.figures import Figures

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

RECONCILE_SECONDS = Histogram(
    "headrace_operator_reconcile_duration_seconds",
    "Time of one pass over one DisaggDeployment, by result (ok, refused, error)",
    ["namespace", "result"],
    buckets=_SECONDS,
)
RECONCILE_ERRORS = Counter(
    "headrace_operator_reconcile_errors_total", "Passes that failed and are tried again", ["error_type"]
)
QUEUE_DEPTH = Gauge("headrace_operator_queue_depth", "DisaggDeployments that wait for a pass")
QUEUE_SECONDS = Histogram(
    "headrace_operator_queue_duration_seconds", "Time that a DisaggDeployment waited for its pass", buckets=_SECONDS
)
QUEUE_OLDEST = Gauge(
    "headrace_operator_queue_oldest_seconds", "How long the DisaggDeployment that has waited longest has waited by now"
)
API_CALLS = Counter("headrace_operator_api_calls_total", "Requests to the API server", ["verb", "kind"])
API_ERRORS = Counter(
    "headrace_operator_api_errors_total", "Requests to the API server that failed, by HTTP status", ["verb", "status"]
)
ENGINE_LOOKS = Counter(
    "headrace_operator_engine_looks_total", "Engines asked for scaling.mode Auto, by result (ok, failed)", ["result"]
)
IS_LEADER = Gauge("headrace_operator_is_leader", "1 while this process holds the lease and works, 0 while it stands by")
STALE_OBJECTS = Gauge(
    "headrace_operator_stale_objects", "Objects that the last comparison with the API server found out of date"
)
LAST_COMPARISON = Gauge(
    "headrace_operator_last_comparison_timestamp_seconds",
    "When the watched objects were last found equal to the API server's",
)


class Deployments(Collector):
    """Gauges of every deployment that this process has looked at; those of one that is gone go with it."""

    def __init__(self) -> None:
        self._figures: dict[tuple[str, str], Figures] = {}  # by namespace and name

    def set(self, namespace: str, name: str, figures: Figures) -> None:
        self._figures[namespace, name] = figures

    def forget(self, namespace: str, name: str) -> None:
        self._figures.pop((namespace, name), None)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        return iter(_families())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        groups, wanted, updated, failed, without_room, short, conditions, pressures, loads = _families()
        for where, figures in sorted(self._figures.items()):
            for role, counts in figures.roles.items():
                wanted.add_metric([*where, role], counts.wanted)
                updated.add_metric([*where, role], counts.updated)
                failed.add_metric([*where, role], counts.failed)
                without_room.add_metric([*where, role], counts.without_room)
                short.add_metric([*where, role], counts.short_gpus)
                if counts.load is not None:
                    loads.add_metric([*where, role], counts.load)
                for signal, pressure in counts.pressures.items():
                    pressures.add_metric([*where, role, signal], pressure)
                for state, count in counts.by_state.items():
                    groups.add_metric([*where, role, state], count)
            for kind, holds in figures.conditions.items():
                conditions.add_metric([*where, kind], float(holds))
        return iter((groups, wanted, updated, failed, without_room, short, conditions, pressures, loads))


def _families() -> tuple[GaugeMetricFamily, ...]:
    where = ["namespace", "deployment"]
    return (
        GaugeMetricFamily(
            "headrace_operator_groups", "Wanted groups of a role by state", labels=[*where, "role", "state"]
        ),
        GaugeMetricFamily("headrace_operator_wanted_groups", "Groups that a role is to have", labels=[*where, "role"]),
        GaugeMetricFamily(
            "headrace_operator_updated_groups",
            "Groups at the wanted revision: fewer than wanted while a roll-out is under way",
            labels=[*where, "role"],
        ),
        GaugeMetricFamily(
            "headrace_operator_failed_groups",
            "Groups that were given up after too many restarts",
            labels=[*where, "role"],
        ),
        GaugeMetricFamily(
            "headrace_operator_groups_without_room",
            "Groups that are not made because nothing has room for them",
            labels=[*where, "role"],
        ),
        GaugeMetricFamily(
            "headrace_operator_short_gpus", "GPUs that the groups without room would take", labels=[*where, "role"]
        ),
        GaugeMetricFamily(
            "headrace_operator_condition", "1 where a condition of a deployment holds, else 0", labels=[*where, "type"]
        ),
        GaugeMetricFamily(
            "headrace_operator_autoscale_pressure",
            "With scaling.mode Auto: a signal of a role in units of its target; over 1 the role is short",
            labels=[*where, "role", "signal"],
        ),
        GaugeMetricFamily(
            "headrace_operator_autoscale_load",
            "With scaling.mode Auto: share of what the role's groups can do that they have to do",
            labels=[*where, "role"],
        ),
    )


DEPLOYMENTS = Deployments()
REGISTRY.register(DEPLOYMENTS)
