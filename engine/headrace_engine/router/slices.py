"""EndpointSlice objects to endpoints. Pure; the objects are the API's JSON (discovery.k8s.io/v1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headrace_engine.core import Role
from headrace_engine.router.group import Endpoint

SERVICE_LABEL = "kubernetes.io/service-name"
PORT_NAME = "http"
DEFAULT_PORT = 8000


def service_roles(deployment: str) -> dict[str, Role]:
    """Name of the Service that lists a role's leaders -> the role."""
    return {f"{deployment}-{role}-leaders": role for role in Role}


def endpoints_of(slices: Iterable[Mapping[str, Any]], roles: Mapping[str, Role]) -> list[Endpoint]:
    """All groups in these slices, each once, in order of name.

    A pod may stand in two slices while it is moved from one to another, and in one per address family: it is ready if
    any says so, and IPv4 is taken first.
    """
    found: dict[tuple[Role, str], Endpoint] = {}
    for item in sorted(slices, key=lambda item: (item.get("addressType") != "IPv4", item["metadata"]["name"])):
        role = roles.get(item["metadata"].get("labels", {}).get(SERVICE_LABEL, ""))
        if role is None:
            continue
        port = _port(item.get("ports") or [])
        for entry in item.get("endpoints") or []:
            endpoint = _endpoint(role, item.get("addressType", "IPv4"), port, entry)
            if endpoint is None:
                continue
            other = found.get((role, endpoint.name))
            if other is None or (endpoint.ready and not other.ready):
                found[role, endpoint.name] = endpoint
    return [found[key] for key in sorted(found)]


def _endpoint(role: Role, family: str, port: int, entry: Mapping[str, Any]) -> Endpoint | None:
    addresses = entry.get("addresses") or []
    if not addresses:
        return None
    host = f"[{addresses[0]}]" if family == "IPv6" else addresses[0]
    name = (entry.get("targetRef") or {}).get("name") or host
    return Endpoint(role, f"http://{host}:{port}", name, ready=_is_ready(entry.get("conditions") or {}))


def _is_ready(conditions: Mapping[str, Any]) -> bool:
    """Whether a pod is Ready and is to stay. `ready` does not tell: the Service publishes pods that are not, so that
    ranks can meet, and calls every one of them ready. What is not said is to be read as well, says the API."""
    return conditions.get("serving") is not False and not conditions.get("terminating")


def _port(ports: list[Mapping[str, Any]]) -> int:
    named = [entry for entry in ports if entry.get("name") == PORT_NAME] or ports
    return (named[0].get("port") if named else None) or DEFAULT_PORT
