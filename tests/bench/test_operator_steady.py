"""The steady-state measurement counts every write of the API server but the heartbeats that every cluster has."""

from __future__ import annotations

import pytest
from tests.bench.operator_steady import resident_bytes, writes_by_resource


def _requests(verb: str, resource: str, count: int, subresource: str = "") -> str:
    return (
        f'apiserver_request_total{{code="200",group="",resource="{resource}",scope="resource",'
        f'subresource="{subresource}",verb="{verb}",version="v1"}} {count}'
    )


def test_writes_are_counted_by_resource_and_reads_are_not() -> None:
    metrics = "\n".join(
        [
            "# TYPE apiserver_request_total counter",
            _requests("APPLY", "disaggdeployments", 2, "status"),
            _requests("PATCH", "disaggdeployments", 1, "status"),
            _requests("POST", "pods", 3),
            _requests("LIST", "pods", 90),
            _requests("WATCH", "pods", 90),
            'apiserver_request_duration_seconds_count{resource="pods",verb="POST"} 50',
        ]
    )
    assert writes_by_resource(metrics) == {"disaggdeployments/status": 3, "pods": 3}


@pytest.mark.parametrize(("resource", "subresource"), [("leases", ""), ("nodes", "status")])
def test_heartbeats_are_left_out(resource: str, subresource: str) -> None:
    assert not writes_by_resource(_requests("PATCH", resource, 500, subresource))


def test_memory_comes_from_the_process_itself() -> None:
    assert resident_bytes("# HELP x\nprocess_resident_memory_bytes 1.5e+08\n") == 1.5e8
    with pytest.raises(ValueError, match="no process_resident_memory_bytes"):
        resident_bytes("python_info 1.0\n")
