"""Drift: what is applied again, and what is left alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from headrace_operator.drift import has_drifted, holds, metadata_repair
from headrace_operator.render.objects import stamped


def service(**spec: Any) -> dict[str, Any]:
    return stamped(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "demo", "labels": {"a": "1"}},
            "spec": {"selector": {"app": "x"}, "ports": [{"name": "http", "port": 8000}], **spec},
        }
    )


def as_stored(body: dict[str, Any]) -> dict[str, Any]:
    """What the API server makes of it: defaults and bookkeeping added."""
    live = copy.deepcopy(body)
    live["metadata"] |= {"uid": "u", "resourceVersion": "7", "creationTimestamp": "now"}
    live["spec"] |= {"clusterIPs": ["None"], "sessionAffinity": "None"}
    live["spec"]["ports"][0]["protocol"] = "TCP"
    live["status"] = {"loadBalancer": {}}
    return live


def test_a_stored_object_has_not_drifted() -> None:
    assert not has_drifted(as_stored(service()), service())


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("a changed field", ("spec", "ports", 0, "port"), 9000),
        ("a removed list item", ("spec", "ports"), []),
        ("an added selector", ("spec", "selector", "extra"), "1"),
        ("a changed label", ("metadata", "labels", "a"), "2"),
        ("a removed label", ("metadata", "labels"), {}),
    ],
)
def test_an_edit_of_what_we_own_is_drift(name: str, path: tuple[Any, ...], value: Any) -> None:
    live = as_stored(service())
    node: Any = live
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    assert has_drifted(live, service())


def test_what_others_add_is_not_drift() -> None:
    live = as_stored(service())
    live["metadata"]["labels"]["team"] = "x"
    live["metadata"]["annotations"]["note"] = "y"
    live["spec"]["ports"].append({"name": "extra", "port": 1})
    assert not has_drifted(live, service())


def test_a_field_that_we_no_longer_render_is_drift() -> None:
    assert has_drifted(as_stored(service(publishNotReadyAddresses=True)), service())


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ("1000m", "1", True),
        (2, "2", True),
        ("1Gi", "1024Mi", True),
        ("0.5", "500m", True),
        ("1G", "1Gi", False),
        ("1", None, False),
    ],
)
def test_quantities_are_compared_by_value(ours: Any, theirs: Any, same: bool) -> None:
    assert holds({"limits": {"cpu": ours}}, {"limits": {"cpu": theirs}}) is same


def pod(image: str = "engine:1", labels: dict[str, str] | None = None) -> dict[str, Any]:
    return stamped(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "demo-0", "labels": labels or {"a": "1"}},
            "spec": {"containers": [{"name": "engine", "image": image}]},
        }
    )


def test_a_pod_is_only_ever_given_its_labels_back() -> None:
    live = copy.deepcopy(pod())
    live["metadata"] |= {"namespace": "default", "uid": "u"}
    assert not has_drifted(live, pod())
    live["spec"]["containers"][0]["image"] = "mirror/engine:1"  # admission may do so
    assert not has_drifted(live, pod())
    live["metadata"]["labels"] = {}
    assert has_drifted(live, pod())
    # Not the image: applying our own over the mirror's would restart the container.
    assert metadata_repair(live, pod()) == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "demo-0", "namespace": "default", "uid": "u", "labels": {"a": "1"}},
    }


def test_a_pod_rendered_otherwise_by_another_version_is_left_alone() -> None:
    assert not has_drifted(pod(image="engine:0"), pod())
