"""The operator's own metrics, all named `headrace_operator_*`."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

RECONCILE_SECONDS = Histogram(
    "headrace_operator_reconcile_seconds",
    "Time of one pass over one DisaggDeployment, by result (ok, refused, error)",
    ["result"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
RECONCILE_ERRORS = Counter(
    "headrace_operator_reconcile_errors_total", "Passes that failed and are tried again", ["error"]
)
QUEUE_DEPTH = Gauge("headrace_operator_queue_depth", "DisaggDeployments that wait for a pass")
API_CALLS = Counter("headrace_operator_api_calls_total", "Requests to the API server", ["verb", "kind"])
IS_LEADER = Gauge("headrace_operator_is_leader", "1 while this process holds the lease and works, 0 while it stands by")
STALE_OBJECTS = Gauge(
    "headrace_operator_stale_objects", "Objects that the last comparison with the API server found out of date"
)
LAST_COMPARISON = Gauge(
    "headrace_operator_last_comparison_timestamp_seconds",
    "When the watched objects were last found equal to the API server's",
)
