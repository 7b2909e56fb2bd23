"""EndpointSlice objects to endpoints."""

from __future__ import annotations

import pytest
from tests.router.fake_api_server import endpoint_slice

from headrace_engine.core import Role
from headrace_engine.router.group import Endpoint
from headrace_engine.router.slices import endpoints_of, service_roles

ROLES = service_roles("dd")


def entry(address: str, pod: str | None = None, **conditions) -> dict:
    result: dict = {"addresses": [address], "conditions": conditions}
    if pod:
        result["targetRef"] = {"kind": "Pod", "name": pod}
    return result


P = Role.PREFILL
CASES = {
    "a ready leader": (
        [endpoint_slice("s", "dd-prefill-leaders", [entry("10.0.0.1", "p0", ready=True, serving=True)])],
        [Endpoint(P, "http://10.0.0.1:8000", "p0")],
    ),
    "one that is not ready is known but not used": (
        [endpoint_slice("s", "dd-prefill-leaders", [entry("10.0.0.1", "p0", ready=True, serving=False)])],
        [Endpoint(P, "http://10.0.0.1:8000", "p0", ready=False)],
    ),
    "one that is on its way out is not used, ready as it may be": (
        [endpoint_slice("s", "dd-prefill-leaders", [entry("10.0.0.1", "p0", serving=True, terminating=True)])],
        [Endpoint(P, "http://10.0.0.1:8000", "p0", ready=False)],
    ),
    "unknown readiness reads as ready, as the API says": (
        [endpoint_slice("s", "dd-prefill-leaders", [entry("10.0.0.1", "p0")])],
        [Endpoint(P, "http://10.0.0.1:8000", "p0")],
    ),
    "another deployment's slice is not ours": (
        [endpoint_slice("s", "other-prefill-leaders", [entry("10.0.0.1", "p0", ready=True, serving=True)])],
        [],
    ),
    "the port called http is taken": (
        [
            endpoint_slice(
                "s",
                "dd-prefill-leaders",
                [entry("10.0.0.1", "p0")],
                ports=[{"name": "metrics", "port": 9}, {"name": "http", "port": 81}],
            )
        ],
        [Endpoint(P, "http://10.0.0.1:81", "p0")],
    ),
    "a single port of any name is taken": (
        [endpoint_slice("s", "dd-prefill-leaders", [entry("10.0.0.1", "p0")], ports=[{"name": "", "port": 82}])],
        [Endpoint(P, "http://10.0.0.1:82", "p0")],
    ),
    "a slice without ports or endpoints": ([endpoint_slice("s", "dd-prefill-leaders", None, ports=None)], []),
    "an IPv6 address is bracketed": (
        [endpoint_slice("s", "dd-prefill-leaders", [entry("fd00::1", "p0")], family="IPv6")],
        [Endpoint(P, "http://[fd00::1]:8000", "p0")],
    ),
    "a pod with both families is one group, by IPv4": (
        [
            endpoint_slice("a", "dd-prefill-leaders", [entry("fd00::1", "p0")], family="IPv6"),
            endpoint_slice("b", "dd-prefill-leaders", [entry("10.0.0.1", "p0")]),
        ],
        [Endpoint(P, "http://10.0.0.1:8000", "p0")],
    ),
    "a pod that moves between slices is one group, ready if either says so": (
        [
            endpoint_slice("a", "dd-prefill-leaders", [entry("10.0.0.1", "p0", ready=True, serving=False)]),
            endpoint_slice("b", "dd-prefill-leaders", [entry("10.0.0.1", "p0", ready=True, serving=True)]),
        ],
        [Endpoint(P, "http://10.0.0.1:8000", "p0")],
    ),
    "an endpoint without a pod is named by its address": (
        [endpoint_slice("a", "dd-prefill-leaders", [entry("10.0.0.1")])],
        [Endpoint(P, "http://10.0.0.1:8000", "10.0.0.1")],
    ),
    "roles by their Services": (
        [
            endpoint_slice("a", "dd-prefill-leaders", [entry("10.0.0.1", "p0")]),
            endpoint_slice("b", "dd-decode-leaders", [entry("10.0.0.2", "d0")]),
            endpoint_slice("c", "dd-unified-leaders", [entry("10.0.0.3", "u0")]),
        ],
        [
            Endpoint(Role.DECODE, "http://10.0.0.2:8000", "d0"),
            Endpoint(P, "http://10.0.0.1:8000", "p0"),
            Endpoint(Role.UNIFIED, "http://10.0.0.3:8000", "u0"),
        ],
    ),
}


@pytest.mark.parametrize(("slices", "expected"), CASES.values(), ids=CASES.keys())
def test_endpoints_of(slices, expected):
    assert endpoints_of(slices, ROLES) == expected
