"""What the operator believes about the scheduler: requests, labels, affinity and taints, by Kubernetes' own rules."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_operator.quantities import quantity, thousandths
from headrace_operator.scheduling import Node, node_of, requests_of, shape_of

GPU = "nvidia.com/gpu"


def node(labels: dict[str, str] | None = None, **spec: Any) -> Node:
    metadata = {"name": "n1", "labels": labels or {}}
    return node_of({"metadata": metadata, "spec": spec, "status": {"allocatable": {"cpu": "8", "pods": "110"}}})


def container(requests: dict[str, Any] | None = None, limits: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"name": "c", "resources": {"requests": requests or {}, "limits": limits or {}}}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2", 2000),
        (3, 3000),
        ("500m", 500),
        ("1Ki", 1024000),
        ("1k", 1000000),
        ("1e3", 1000000),
        ("1n", 1),
        ("0.1", 100),
    ],
)
def test_quantities_are_counted_in_thousandths_rounded_up(text: Any, number: int) -> None:
    assert thousandths(text) == number


@pytest.mark.parametrize("text", ["a lot", "", "NaN", "inf", "1Zi", None])
def test_what_is_no_quantity_is_an_error(text: Any) -> None:
    with pytest.raises(ValueError, match="is not a Kubernetes quantity"):
        quantity(text)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, {}),
        (
            {"containers": [container({"cpu": 1}), container({"cpu": "500m", "memory": 1})]},
            {"cpu": 1500, "memory": 1000},
        ),
        ({"containers": [container(limits={GPU: 4})]}, {GPU: 4000}),
        ({"containers": [container({"cpu": 1}, {"cpu": 2})]}, {"cpu": 1000}),
        ({"containers": [container({"cpu": 1})], "initContainers": [container({"cpu": 3})]}, {"cpu": 3000}),
        ({"containers": [container({"cpu": 3})], "initContainers": [container({"cpu": 1})]}, {"cpu": 3000}),
        (
            {
                "containers": [container({"cpu": 2})],
                "initContainers": [{**container({"cpu": 1}), "restartPolicy": "Always"}, container({"cpu": 3})],
            },
            {"cpu": 4000},
        ),
        ({"containers": [container({"cpu": 1})], "overhead": {"cpu": "250m"}}, {"cpu": 1250}),
        ({"containers": [container({"cpu": 9})], "resources": {"requests": {"cpu": 2}}}, {"cpu": 2000}),
        ({"containers": [container({"cpu": 0})]}, {}),
    ],
    ids=[
        "nothing but its place",
        "containers add up",
        "a limit is a request",
        "a request beats a limit",
        "the largest init container",
        "init containers run before the others",
        "a sidecar runs beside both",
        "the runtime's overhead",
        "requests of the whole pod",
        "a request for nothing",
    ],
)
def test_requests_of_a_pod(spec: dict[str, Any], expected: dict[str, int]) -> None:
    assert requests_of(spec) == {**expected, "pods": 1000}


def affinity(*terms: dict[str, Any]) -> dict[str, Any]:
    required = {"nodeSelectorTerms": list(terms)}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}}


def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    ("spec", "fits"),
    [
        ({}, True),
        ({"nodeSelector": {"rack": "a"}}, True),
        ({"nodeSelector": {"rack": "a", "disk": "fast"}}, False),
        (affinity(expression("rack", "In", "a", "b")), True),
        (affinity(expression("rack", "In", "b")), False),
        (affinity(expression("rack", "NotIn", "a")), False),
        (affinity(expression("disk", "NotIn", "fast")), True),
        (affinity(expression("rack", "Exists")), True),
        (affinity(expression("rack", "DoesNotExist")), False),
        (affinity(expression("size", "Gt", "3")), True),
        (affinity(expression("size", "Lt", "3")), False),
        (affinity(expression("rack", "Gt", "3")), False),
        (affinity(expression("rack", "Near", "a")), False),
        (affinity(expression("rack", "In", "b"), expression("size", "Exists")), True),
        (affinity({}), False),
        (affinity(), False),
        (affinity({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}), True),
        (affinity({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]}), False),
    ],
)
def test_labels_and_affinity(spec: dict[str, Any], fits: bool) -> None:
    assert (shape_of(spec).objection(node({"rack": "a", "size": "4"})) is None) == fits


TAINT = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("taint", "toleration", "fits"),
    [
        (TAINT, None, False),
        ({**TAINT, "effect": "NoExecute"}, None, False),
        ({**TAINT, "effect": "PreferNoSchedule"}, None, True),
        (TAINT, {"key": "gpu", "value": "yes"}, True),
        (TAINT, {"key": "gpu", "value": "no"}, False),
        (TAINT, {"key": "gpu", "operator": "Exists"}, True),
        (TAINT, {"operator": "Exists"}, True),
        (TAINT, {"key": "gpu", "operator": "Exists", "effect": "NoExecute"}, False),
        (TAINT, {"key": "other", "operator": "Exists"}, False),
        ({"key": "gpu", "effect": "NoSchedule"}, {"key": "gpu"}, True),
    ],
)
def test_taints_and_tolerations(taint: dict[str, Any], toleration: dict[str, Any] | None, fits: bool) -> None:
    spec = {"tolerations": [toleration]} if toleration else {}
    assert (shape_of(spec).objection(node(taints=[taint])) is None) == fits


def test_a_cordoned_node_is_full_for_all_but_those_that_tolerate_it() -> None:
    cordoned = node(unschedulable=True)
    assert "unschedulable" in (shape_of({}).objection(cordoned) or "")
    toleration = {"key": "node.kubernetes.io/unschedulable", "operator": "Exists", "effect": "NoSchedule"}
    assert shape_of({"tolerations": [toleration]}).objection(cordoned) is None


@pytest.mark.parametrize(
    "spec",
    [
        {"affinity": {"nodeAffinity": "rack-a"}},
        {"affinity": "near"},
        {"tolerations": ["all"]},
        {"containers": [{"resources": {"requests": {"cpu": "much"}}}]},
        affinity({"matchExpressions": [{"key": "rack"}]}),
    ],
)
def test_a_malformed_spec_is_one_kind_of_error(spec: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        shape_of(spec)
