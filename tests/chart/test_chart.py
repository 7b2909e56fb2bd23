"""The chart: one behaviour a test, over what `helm template` renders."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tests.chart.conftest import CHART, Render

from headrace_operator import names
from headrace_operator.kinds import CHILD_KINDS, OPTIONAL_KINDS, RESOURCES
from headrace_operator.render.router import ROUTER_RULES

GOLDEN = Path(__file__).parent / "golden/default.yaml"


def one(bodies: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (body,) = [body for body in bodies if body["kind"] == kind]
    return body


def container(bodies: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = one(bodies, "Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_it_has_no_lint(helm: str) -> None:
    result = subprocess.run([helm, "lint", "--strict", str(CHART)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr


def test_defaults_render_as_recorded(render: Render, update_golden: bool) -> None:
    text = yaml.safe_dump_all(render(), sort_keys=False)
    if update_golden:
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(text)
    assert GOLDEN.read_text() == text, "if this is meant, run pytest --update-golden and read the difference"


def test_default_values_fit_the_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.validate(yaml.safe_load((CHART / "values.yaml").read_text()), schema)


def test_every_value_has_prose() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    keys = [
        (number, line)
        for number, line in enumerate(lines)
        # Blocks of values describe themselves by their members; what is below resources is Kubernetes' own.
        if re.match(r"^( {0,2})[a-zA-Z]+:", line) and not re.match(r"^[a-zA-Z]+:$", line)
    ]
    assert [line for number, line in keys if not lines[number - 1].strip().startswith("#")] == []


@pytest.mark.parametrize(
    "values",
    [
        {"oprator": {}},
        {"operator": {"logLevel": "loud"}},
        {"operator": {"image": "a b"}},
        {"operator": {"replicas": -1}},
        {"watchNamespaces": "default"},
        {"watchNamespaces": ["Not-A-Name"]},
        {"metrics": {"service": "yes"}},
        {"capacity": {"clusterWide": "yes"}},
    ],
    ids=json.dumps,
)
def test_wrong_values_are_refused(
    template: Callable[[dict[str, Any]], subprocess.CompletedProcess[str]], values: dict[str, Any]
) -> None:
    result = template(values)
    assert result.returncode != 0
    assert "schema" in result.stderr


def test_images_reach_the_operator(render: Render) -> None:
    bodies = render({"operator": {"image": "op:1"}, "engine": {"image": "en:2"}})
    found = container(bodies)
    assert found["image"] == "op:1"
    environment = {variable["name"]: variable["value"] for variable in found["env"]}
    assert environment == {names.ENV_ENGINE_IMAGE: "en:2", names.ENV_ROUTER_IMAGE: "op:1"}


def test_a_router_image_of_its_own(render: Render) -> None:
    environment = container(render({"router": {"image": "ro:3"}}))["env"]
    assert {"name": names.ENV_ROUTER_IMAGE, "value": "ro:3"} in environment


def test_probes_ask_the_operators_own_port(render: Render) -> None:
    found = container(render())
    assert found["ports"] == [{"name": "metrics", "containerPort": names.PORT_OPERATOR}]
    assert found["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert found["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}


def test_one_operator_is_replaced_and_several_stand_by_on_nodes_of_their_own(render: Render) -> None:
    alone = one(render(), "Deployment")["spec"]
    assert (alone["replicas"], alone["strategy"]) == (1, {"type": "Recreate"})
    assert "topologySpreadConstraints" not in alone["template"]["spec"]
    several = one(render({"operator": {"replicas": 2}}), "Deployment")["spec"]
    assert several["replicas"] == 2
    assert "strategy" not in several
    (spread,) = several["template"]["spec"]["topologySpreadConstraints"]
    labels = several["template"]["metadata"]["labels"]
    assert spread["labelSelector"]["matchLabels"].items() <= labels.items()


def test_the_lease_is_in_the_operators_own_namespace_and_its_only_right_there(render: Render) -> None:
    for values in ({}, {"watchNamespaces": ["a"]}):
        bodies = render(values)
        assert "--lease=system/headrace" in container(bodies)["args"]
        (role,) = [b for b in bodies if b["kind"] == "Role" and b["metadata"]["name"] == "headrace-lease"]
        assert role["metadata"]["namespace"] == "system"
        group = ["coordination.k8s.io"]
        assert role["rules"] == [
            {"apiGroups": group, "resources": ["leases"], "resourceNames": ["headrace"], "verbs": ["get", "update"]},
            {"apiGroups": group, "resources": ["leases"], "verbs": ["create"]},
        ]


def test_it_runs_under_the_restricted_pod_security_standard(render: Render) -> None:
    pod = one(render(), "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(render())["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def expected_rules() -> set[tuple[str, str, str]]:
    """(group, resource, verb) of everything that the operator calls, and of what it grants to routers."""
    rules = {(names.GROUP, names.PLURAL, verb) for verb in ("get", "list", "watch")}
    rules |= {(names.GROUP, f"{names.PLURAL}/status", "patch"), (names.GROUP, f"{names.PLURAL}/finalizers", "update")}
    rules.add((names.GROUP, f"{names.SCALER_PLURAL}/status", "patch"))
    for kind in (*CHILD_KINDS, *OPTIONAL_KINDS):
        group, _, plural = RESOURCES[kind]
        rules |= {(group, plural, verb) for verb in ("get", "list", "watch", "create", "patch", "delete")}
    for rule in ROUTER_RULES:
        rules |= {(g, r, v) for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}
    return rules | {("", "events", "create"), ("", "pods/status", "patch")}


CLUSTER_RULES = {("", "nodes", "get")} | {("", p, verb) for p in ("nodes", "pods") for verb in ("list", "watch")}


def rules_of(role: dict[str, Any]) -> set[tuple[str, str, str]]:
    return {
        (g, r, v) for rule in role["rules"] for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]
    }


def test_the_operator_may_do_exactly_what_it_does(render: Render) -> None:
    assert rules_of(one(render(), "ClusterRole")) == expected_rules() | CLUSTER_RULES


def test_with_namespaces_it_may_look_at_nodes_if_allowed(render: Render) -> None:
    bodies = render({"watchNamespaces": ["a"], "capacity": {"clusterWide": True}})
    role, binding = one(bodies, "ClusterRole"), one(bodies, "ClusterRoleBinding")
    assert rules_of(role) == CLUSTER_RULES
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "headrace", "namespace": "system"}]


def test_with_namespaces_nothing_is_cluster_wide(render: Render) -> None:
    bodies = render({"watchNamespaces": ["a", "b"]})
    assert not [body for body in bodies if body["kind"].startswith("Cluster")]
    roles = [body for body in bodies if body["kind"] == "Role" and body["metadata"]["name"] == "headrace"]
    assert [role["metadata"]["namespace"] for role in roles] == ["a", "b"]
    assert all(rules_of(role) == expected_rules() for role in roles)
    assert [arg for arg in container(bodies)["args"] if "namespace" in arg] == ["--namespace=a", "--namespace=b"]
    for binding in (body for body in bodies if body["kind"] == "RoleBinding"):
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "headrace", "namespace": "system"}]


def test_the_metrics_service_can_be_left_out(render: Render) -> None:
    assert one(render(), "Service")["spec"]["ports"][0]["port"] == names.PORT_OPERATOR
    assert not [body for body in render({"metrics": {"service": False}}) if body["kind"] == "Service"]
