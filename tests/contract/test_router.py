"""The router that the operator renders starts, follows the Services that it renders, and may read what it follows."""

from __future__ import annotations

from typing import Any

import pytest
from tests.contract.rendered import deployments, objects, router_argv

from headrace_engine.core import Role
from headrace_engine.router import cli, slices
from headrace_engine.router.group import Endpoint
from headrace_engine.router.kubernetes import ApiServer, EndpointSliceSource
from headrace_operator import names
from headrace_operator.api import DisaggDeployment
from headrace_operator.render.router import ROUTER_RULES
from headrace_operator.render.runtimes.headrace import static_router_command

each_deployment = pytest.mark.parametrize("deployment", deployments(), ids=lambda item: item.metadata.name)


@each_deployment
def test_the_router_understands_what_the_resource_says(deployment: DisaggDeployment) -> None:
    program, *arguments = router_argv(deployment)
    assert program == "headrace-router"
    parsed = cli.parser().parse_args(arguments)
    assert cli.check(parsed) is None
    metadata, spec = deployment.metadata, deployment.spec
    assert (parsed.host, parsed.port, parsed.model) == ("0.0.0.0", names.PORT_HTTP, spec.model.name)
    assert (parsed.namespace, parsed.deployment) == (metadata.namespace, metadata.name)
    assert cli.limits_of(parsed).drain_seconds == spec.drain_timeout_seconds


@pytest.mark.parametrize("drain_seconds", [0, 1, 86400])
def test_the_router_takes_every_drain_time_that_the_resource_may_have(drain_seconds: int) -> None:
    leaders = [("prefill", "http://127.0.0.1:8101"), ("decode", "http://127.0.0.1:8104")]
    _, *arguments = static_router_command("tiny", "127.0.0.1", 8100, drain_seconds, leaders)
    parsed = cli.parser().parse_args(arguments)
    assert cli.check(parsed) is None
    assert [(endpoint.role, endpoint.url) for endpoint in parsed.static] == leaders
    assert abs(cli.limits_of(parsed).drain_seconds - drain_seconds) <= 1


def slice_of(service: dict[str, Any], pod: dict[str, Any]) -> dict[str, Any]:
    """The EndpointSlice that Kubernetes makes of a headless Service and one ready pod."""
    ports = [{"name": port["name"], "port": port["targetPort"]} for port in service["spec"]["ports"]]
    name = pod["metadata"]["name"]
    conditions = {"ready": True, "serving": True, "terminating": False}
    endpoint = {"addresses": ["10.0.0.7"], "conditions": conditions, "targetRef": {"kind": "Pod", "name": name}}
    labels = {**service["metadata"]["labels"], "kubernetes.io/service-name": service["metadata"]["name"]}
    metadata = {"name": f"{service['metadata']['name']}-x", "labels": labels}
    return {"addressType": "IPv4", "metadata": metadata, "ports": ports, "endpoints": [endpoint]}


def selects(service: dict[str, Any], pod: dict[str, Any]) -> bool:
    return bool(service["spec"]["selector"].items() <= pod["metadata"]["labels"].items())


@each_deployment
def test_the_router_finds_each_ready_leader_under_its_role_and_nothing_else(deployment: DisaggDeployment) -> None:
    roles = slices.service_roles(deployment.metadata.name)
    services, pods = objects(deployment, "Service"), objects(deployment, "Pod")
    found = {
        (endpoint.role, endpoint.name)
        for service in services
        for pod in pods
        if selects(service, pod)
        for endpoint in slices.endpoints_of([slice_of(service, pod)], roles)
    }
    leaders = {
        (Role(pod["metadata"]["labels"][names.LABEL_ROLE]), pod["metadata"]["name"])
        for pod in pods
        if pod["metadata"]["labels"][names.LABEL_POD_INDEX] == "0"
    }
    assert found == leaders


@each_deployment
def test_the_router_asks_leaders_on_the_port_where_they_listen(deployment: DisaggDeployment) -> None:
    roles = slices.service_roles(deployment.metadata.name)
    service = next(body for body in objects(deployment, "Service") if body["metadata"]["name"] in roles)
    pod = next(pod for pod in objects(deployment, "Pod") if selects(service, pod))
    (endpoint,) = slices.endpoints_of([slice_of(service, pod)], roles)
    arguments = pod["spec"]["containers"][0]["args"]
    assert endpoint == Endpoint(
        roles[service["metadata"]["name"]],
        f"http://10.0.0.7:{arguments[arguments.index('--port') + 1]}",
        pod["metadata"]["name"],
    )


def test_the_router_looks_only_where_its_role_allows() -> None:
    source = EndpointSliceSource(ApiServer("http://api"), "serving", "v4", None)  # type: ignore[arg-type]
    (rule,) = ROUTER_RULES
    group, resource = rule["apiGroups"][0], rule["resources"][0]
    assert source._path == f"http://api/apis/{group}/v1/namespaces/serving/{resource}"
    assert set(rule["verbs"]) == {"list", "watch"}


def test_both_sides_know_the_same_roles() -> None:
    assert {names.PREFILL, names.DECODE, names.UNIFIED} == set(Role)
    assert {names.role_service_name("v4", role): role for role in Role} == slices.service_roles("v4")
    assert slices.DEFAULT_PORT == names.PORT_HTTP
