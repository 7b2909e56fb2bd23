"""The comparison with Deployments: both make the same pods, and what is read from events and metrics is read right."""

from __future__ import annotations

from typing import Any

import pytest
from tests.bench.operator_scale import (
    SHAPES,
    Shape,
    costs,
    deployments,
    disagg_deployments,
    growth_shape,
    writes,
)
from tests.bench.podwatch import Tally
from tests.bench.prometheus import samples_of

from headrace_operator.decide import Defaults
from headrace_operator.manifests import DisaggDeployment
from headrace_operator.preview import preview


@pytest.mark.parametrize("shape", [*SHAPES.values(), growth_shape(100)], ids=lambda shape: shape.name)
def test_both_sides_make_the_same_number_of_pods(shape: Shape) -> None:
    theirs = sum(body["spec"]["replicas"] for body in deployments(shape))
    first, *others = disagg_deployments(shape)
    made = preview(DisaggDeployment.from_manifest(first), Defaults("none:1", "none:1"))
    ours = sum(body["kind"] == "Pod" for body in made) * (1 + len(others))
    assert ours == theirs == shape.num_pods


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
def test_the_deployments_have_the_container_of_an_engine_pod_or_a_bare_one(shape: Shape) -> None:
    (theirs,) = deployments(shape)[0]["spec"]["template"]["spec"]["containers"]
    made = preview(DisaggDeployment.from_manifest(disagg_deployments(shape)[0]), Defaults("none:1", "none:1"))
    assert theirs in [container for body in made if body["kind"] == "Pod" for container in body["spec"]["containers"]]
    (bare,) = deployments(shape, is_bare=True)[0]["spec"]["template"]["spec"]["containers"]
    assert set(bare) == {"name", "image"}


def event(kind: str, name: str, ready: str) -> dict[str, Any]:
    """An event of a watch."""
    conditions = [{"type": "Ready", "status": ready}] if ready else []
    pod = {"metadata": {"name": name} if name else {}, "status": {"conditions": conditions}}
    return {"type": kind, "object": pod}


def test_pods_are_counted_from_events() -> None:
    tally = Tally()
    for kind, name, ready in (
        ("ADDED", "a", ""), ("ADDED", "b", "False"), ("MODIFIED", "a", "True"), ("MODIFIED", "a", "True"),
        ("DELETED", "b", "False"), ("BOOKMARK", "", ""),
    ):  # fmt: skip
        tally.take(event(kind, name, ready))
    assert (len(tally.is_ready), tally.num_ready) == (1, 1)
    tally.take(event("MODIFIED", "a", "False"))
    assert tally.num_ready == 0
    tally.take(event("DELETED", "a", "False"))
    assert (len(tally.is_ready), tally.num_ready) == (0, 0)
    tally.restart([event("ADDED", "c", "True")["object"], event("ADDED", "d", "")["object"]])
    assert (len(tally.is_ready), tally.num_ready) == (2, 1)


BEFORE = """\
# TYPE headrace_operator_reconcile_duration_seconds histogram
headrace_operator_reconcile_duration_seconds_bucket{le="0.1",result="ok"} 5
headrace_operator_reconcile_duration_seconds_bucket{le="1.0",result="ok"} 5
headrace_operator_reconcile_duration_seconds_bucket{le="+Inf",result="ok"} 5
headrace_operator_reconcile_duration_seconds_count{result="ok"} 5
headrace_operator_reconcile_duration_seconds_sum{result="ok"} 0.1
# TYPE headrace_operator_api_calls counter
headrace_operator_api_calls_total{verb="apply",kind="Pod"} 10
"""
AFTER = """\
# TYPE headrace_operator_reconcile_duration_seconds histogram
headrace_operator_reconcile_duration_seconds_bucket{le="0.1",result="ok"} 14
headrace_operator_reconcile_duration_seconds_bucket{le="1.0",result="ok"} 15
headrace_operator_reconcile_duration_seconds_bucket{le="+Inf",result="ok"} 15
headrace_operator_reconcile_duration_seconds_count{result="ok"} 15
headrace_operator_reconcile_duration_seconds_sum{result="ok"} 1.1
# TYPE headrace_operator_api_calls counter
headrace_operator_api_calls_total{verb="apply",kind="Pod"} 40
headrace_operator_api_calls_total{verb="update",kind="Lease"} 99
headrace_operator_api_calls_total{verb="create",kind="Lease"} 1
headrace_operator_api_calls_total{verb="watch",kind="Pod"} 0
headrace_operator_api_calls_total{verb="list",kind="Pod"} 0
# TYPE process_resident_memory_bytes gauge
process_resident_memory_bytes 1048576
"""


def test_costs_are_what_came_between_two_looks() -> None:
    spent = costs(samples_of(BEFORE), samples_of(AFTER))
    assert spent["passes"] == 10
    assert spent["requests per pass"] == 3
    assert spent["pass p50 (ms)"] == pytest.approx(100 * 5 / 9)  # the fifth of nine that took up to 100 ms
    assert spent["pass p99 (ms)"] == pytest.approx(100 + 900 * 0.9)
    assert spent["memory (MiB)"] == 1


def test_renewals_of_the_lease_and_reads_are_no_writes() -> None:
    assert writes(samples_of(AFTER)) == 40
