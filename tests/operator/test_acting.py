"""Carrying out a decision: what depends on what."""

from __future__ import annotations

from typing import Any

from tests.operator.test_reconcile import KEY, FakeServer
from tests.operator.worlds import UID, stored

from headrace_operator import names
from headrace_operator.acting import Actor
from headrace_operator.expectations import Expectations

SHARED = {
    "spec.placement": {"group": "SameDomain", "computeDomain": True},
    "spec.roles.1.parallelism": {"data": 2, "dataLocal": 1, "expert": True},
}


def pods(server: FakeServer, role: str) -> list[str]:
    return [name for kind, name in server.world.objects if kind == "Pod" and f"-{role}-" in name]


async def carry_out(server: FakeServer, changes: dict[str, Any]) -> list[str]:
    actor = Actor(server, lambda key, uid: True, lambda: 0.0)  # type: ignore[arg-type]
    refusals, _ = await actor.act(KEY, UID, server.world.decide(stored(changes)), Expectations())
    return refusals


async def test_pods_are_not_made_without_what_stands_beside_their_group_and_the_rest_is() -> None:
    server = FakeServer()
    server.refuse = names.COMPUTE_DOMAIN_KIND
    assert await carry_out(server, SHARED) == [f"create {names.COMPUTE_DOMAIN_KIND}: exceeded quota"]
    assert not pods(server, "decode")
    assert len(pods(server, "prefill")) == 1
    server.refuse = ""
    assert await carry_out(server, SHARED) == []
    assert len(pods(server, "decode")) == 2


async def test_the_first_apply_over_what_was_created_takes_its_fields_over() -> None:
    server = FakeServer()
    assert await carry_out(server, {}) == []
    place = ("Service", names.role_service_name("demo", names.DECODE))
    created = {"manager": names.MANAGER, "operation": "Update", "apiVersion": "v1", "fieldsV1": {"f:spec": {}}}
    for entry, calls in (
        (created, ["own Service", "apply Service"]),
        ({**created, "operation": "Apply"}, ["apply Service"]),
    ):
        service = server.world.objects[place]
        service["metadata"]["managedFields"] = [entry]
        del service["spec"]["selector"]
        server.calls.clear()
        assert await carry_out(server, {}) == []
        assert server.calls == calls
        assert service["metadata"]["managedFields"] == [{**created, "operation": "Apply"}]
