"""Capacity at work in whole decisions: what is made, where it is tied to, what waits and why, what is taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.operator.racks import RACK, gpus, group, rack, room
from tests.operator.worlds import FakeCluster, ready_status, stored

from headrace_operator import names
from headrace_operator.admission import PLACEMENT_LIMIT_SECONDS, TURN_SECONDS, Capacity
from headrace_operator.api_status import Condition
from headrace_operator.capacity import Room
from headrace_operator.decide import Decision
from headrace_operator.groups import GroupKey
from headrace_operator.upkeep import BROKEN_GRACE_SECONDS

# One prefill group of a pod of 4 GPUs, one decode group of two such pods.
SPEC: dict[str, Any] = {
    "spec.placement": {"group": "SameDomain"},
    "spec.roles.0.parallelism": {"data": 4},
    "spec.roles.0.resources": {"gpu": 4},
    "spec.roles.1.parallelism": {"data": 8, "dataLocal": 4},
    "spec.roles.1.resources": {"gpu": 4},
}
PREFERRED = {**SPEC, "spec.placement": {"group": "SameDomain", "enforcement": "Preferred"}}
IN_ONE_RACK = {**SPEC, "spec.placement": {"deployment": "SameDomain"}}


class World(FakeCluster):
    """A fake cluster with nodes."""

    def __init__(self, rooms: Sequence[Room], changes: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.capacity = Capacity(tuple(rooms))
        self.deployment = stored(changes or SPEC)

    def step(self, now: float = 0.0) -> Decision:
        return self.run(self.deployment, now, capacity=self.capacity)

    def condition(self, kind: str) -> Condition:
        return next(condition for condition in self.status.conditions if condition.type == kind)

    def racks(self) -> dict[str, str | None]:
        """What every pod is tied to, by role and place: `decode-0-1: a`."""
        return {
            "-".join((p["metadata"]["labels"][names.LABEL_ROLE], *name.split("-")[-2:])): p["spec"]
            .get("nodeSelector", {})
            .get(RACK)
            for name, p in self.pods().items()
        }

    def bind(self, pod: str, node: str) -> None:
        """`pod`: end of its name."""
        body = next(body for name, body in self.pods().items() if name.endswith(pod))
        body["spec"]["nodeName"] = node
        body["status"] = {"phase": "Running", "conditions": [{"type": "PodScheduled", "status": "True"}]}

    def refuse(self, pod: str, since: str, reason: str = "Unschedulable") -> None:
        body = next(body for name, body in self.pods().items() if name.endswith(pod))
        condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": "0/9 nodes are available"}
        body["status"] = {"phase": "Pending", "conditions": [{**condition, "lastTransitionTime": since}]}


def test_pods_are_tied_to_the_rack_that_was_chosen_for_their_group() -> None:
    world = World([*rack("a", 4), *rack("b", 4, 4)])
    world.step()
    assert world.racks() == {"prefill-0-0": "a", "decode-0-0": "b", "decode-0-1": "b"}


def test_what_has_no_room_is_not_made_and_the_conditions_say_why() -> None:
    world = World([*rack("a", 4), *rack("b", 4)])
    decision = world.step()
    assert world.racks() == {"prefill-0-0": "a"}
    sentence = "decode needs 8 GPUs (2 pods of 4) in one domain; the freest, b, has 4"
    progressing, ready = world.condition(names.PROGRESSING), world.condition(names.READY)
    assert (progressing.status, progressing.reason, progressing.message) == (
        "False",
        names.REASON_NO_CAPACITY,
        sentence,
    )
    assert (ready.reason, ready.message) == (
        names.REASON_NO_CAPACITY,
        f"{sentence} (prefill 0/1 groups ready, decode 0/1 groups ready)",
    )
    assert [note.reason for note in decision.notes] == ["GroupCreated", names.REASON_NO_CAPACITY]


def test_a_shortage_is_an_event_once_however_its_numbers_change() -> None:
    world = World([*rack("a", 4), *rack("b", 3)])
    world.step()
    world.capacity = Capacity(tuple(rack("b", 2)))
    assert world.step().notes == ()
    assert world.condition(names.PROGRESSING).message.endswith("the freest, b, has 2")


def test_it_is_made_as_soon_as_there_is_room() -> None:
    world = World(rack("a", 4))
    world.step()
    world.capacity = Capacity(tuple(rack("b", 4, 4)))
    world.step()
    assert len(world.pods()) == 3
    world.make_all_ready()
    world.step()
    assert world.condition(names.READY).status == "True"


def test_what_runs_is_left_alone_when_room_vanishes_or_the_placement_changes() -> None:
    world = World(rack("a", 4, 4, 4))
    world.step()
    world.make_all_ready()
    world.capacity = Capacity()
    world.deployment = stored({**SPEC, "spec.placement": {"group": "SameNode"}})
    decision = world.step()
    assert (decision.apply, decision.delete_pods) == ((), ())
    assert world.condition(names.READY).status == "True"


def test_the_placement_is_no_part_of_the_revision() -> None:
    without = stored({key: value for key, value in SPEC.items() if key != "spec.placement"})
    world = World(rack("a", 4, 4, 4))
    assert world.step().revisions == FakeCluster().run(without).revisions


def test_while_room_is_not_known_nothing_is_made_and_the_conditions_say_what_to_do() -> None:
    world = World([])
    world.capacity = Capacity(problem="spec.placement needs the right to list nodes")
    world.step()
    assert world.pods() == {}
    assert world.condition(names.PROGRESSING).reason == names.REASON_CAPACITY_UNKNOWN
    assert "needs the right" in world.condition(names.READY).message


def test_without_a_placement_nobody_looks_at_nodes() -> None:
    cluster = FakeCluster()
    decision = cluster.run(stored(), capacity=Capacity(problem="no right"))
    assert decision.admission is None
    assert len(cluster.pods()) == 2


def test_a_deployment_in_one_rack_stays_there_when_it_grows() -> None:
    world = World([*rack("a", 4, 4, 4), *rack("b", *[4] * 8)], IN_ONE_RACK)
    world.step()
    assert set(world.racks().values()) == {"a"}
    world.make_all_ready()
    for pod in world.pods().values():
        pod["spec"]["nodeName"] = "a-0"
    world.deployment = stored({**IN_ONE_RACK, "spec.roles.0.replicas": 2})
    world.capacity = Capacity((*rack("a", 0, 0, 0), *rack("b", *[4] * 8)))
    world.step()
    assert len(world.pods()) == 3
    assert "prefill needs 4 GPUs in a, where the deployment is; it has 0" in world.condition(names.PROGRESSING).message


def test_the_rack_of_a_deployment_is_known_from_its_nodes_if_its_pods_are_not_tied() -> None:
    world = World([*rack("a", *[4] * 4), *rack("b", *[4] * 8)])
    world.deployment = stored({key: value for key, value in SPEC.items() if key != "spec.placement"})
    world.step()
    world.make_all_ready()
    for pod in world.pods().values():
        pod["spec"]["nodeName"] = "b-3"
    world.deployment = stored({**IN_ONE_RACK, "spec.roles.0.replicas": 2})
    world.step()
    assert world.racks()["prefill-1-0"] == "b"


def test_a_preference_is_no_demand() -> None:
    world = World(rack("a", 4, 4, 4), PREFERRED)
    world.step()
    (pod, *_) = world.pods().values()
    assert "nodeSelector" not in pod["spec"]
    (term,) = pod["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["preference"] == {"matchExpressions": [{"key": RACK, "operator": "In", "values": ["a"]}]}


def test_the_templates_own_affinity_and_selector_are_kept() -> None:
    own = {
        "nodeSelector": {"disk": "fast"},
        "affinity": {
            "podAffinity": {"x": "y"},
            "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]},
        },
    }
    for spec in (SPEC, PREFERRED):
        world = World(
            [room(f"n{i}", gpus(4), **{RACK: "a", "disk": "fast"}) for i in range(3)],
            {**spec, "spec.roles.0.template": own},
        )
        world.step()
        pod = next(body["spec"] for name, body in world.pods().items() if "prefill" in name)
        assert pod["nodeSelector"].items() >= own["nodeSelector"].items()
        assert pod["affinity"]["podAffinity"] == {"x": "y"}
        preferred = pod["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert preferred[0] == {"weight": 1}
        assert len(preferred) == (1 if spec is SPEC else 2)


def test_nodes_that_the_template_does_not_allow_are_not_counted() -> None:
    spec = {**SPEC, "spec.roles.1.template": {"nodeSelector": {RACK: "a"}}}
    world = World([*rack("a", 4, 4, 4), *rack("b", 4, 4)], spec)
    world.step()
    assert world.racks()["decode-0-0"] == "a"


def test_a_template_that_is_no_pod_is_left_for_the_api_server_to_refuse() -> None:
    world = World([], {**SPEC, "spec.roles.0.template": {"affinity": {"nodeAffinity": "rack-a"}}})
    world.step()
    assert list(world.racks()) == ["prefill-0-0"]


def test_pods_that_are_missing_beside_others_follow_them() -> None:
    world = World(rack("a", 4, 4, 4))
    world.step()
    missing = next(name for name in world.pods() if "decode" in name and name.endswith("-1"))
    del world.objects["Pod", missing]
    world.capacity = Capacity(tuple(rack("b", 4, 4)))
    world.step()
    assert world.racks()["decode-0-1"] == "a"


# Two sizes of pods on the same nodes: prefill takes half a node.
TWO_SIZES = {
    **SPEC,
    "spec.placement": {},
    "spec.roles.0.parallelism": {"data": 2},
    "spec.roles.0.resources": {"gpu": 2},
}


def test_small_pods_wait_until_large_ones_have_nodes_and_their_room_is_held() -> None:
    world = World(rack("a", 4, 4, 4), TWO_SIZES)
    decision = world.step()
    assert list(world.racks()) == ["decode-0-0", "decode-0-1"]
    assert decision.admission is not None
    assert [(claim.group.role, claim.is_held) for claim in decision.admission.claims] == [
        ("prefill", True),
        ("decode", False),
    ]
    assert (decision.shortage, decision.admission.is_complete) == (None, False)
    assert decision.wait_seconds == TURN_SECONDS
    world.capacity = Capacity(tuple(rack("a", 0, 0, 4)))
    assert world.step().admission.is_complete  # type: ignore[union-attr]
    assert "prefill-0-0" in world.racks()


def test_others_pods_on_their_way_to_the_same_nodes_are_let_go_first() -> None:
    world = World(rack("a", 4, 4, 4))
    nodes = tuple(rack("a", 4, 4, 4))
    world.capacity = Capacity(nodes, unbound=frozenset({group(1, 1).pod}))
    assert world.step().wait_seconds == TURN_SECONDS
    assert world.racks() == {}
    world.capacity = Capacity(nodes, unbound=frozenset({group(1, 1).pod.selecting([(RACK, "b")])}))
    world.step()
    assert len(world.racks()) == 3


def test_pods_of_one_size_do_not_wait_for_each_other() -> None:
    world = World(rack("a", 4, 4, 4, 4), {**SPEC, "spec.roles.0.replicas": 2})
    world.capacity = Capacity(tuple(rack("a", 4, 4, 4, 4)), unbound=frozenset({group(1, 4).pod}))
    world.step()
    assert len(world.racks()) == 4


SINCE = "1970-01-01T00:00:10Z"
LATE = 10 + PLACEMENT_LIMIT_SECONDS


def half_placed(reason: str = "Unschedulable") -> World:
    world = World(rack("a", 4, 4, 4))
    world.step()
    world.make_all_ready()
    world.bind("-0-0", "a-0")
    decode = next(name for name in world.pods() if "decode" in name and name.endswith("-0"))
    world.bind(decode, "a-0")
    world.refuse("-0-1", SINCE, reason)
    return world


def test_a_group_half_placed_for_too_long_is_taken_back_whole() -> None:
    world = half_placed()
    decision = world.step(LATE)
    assert [(d.pod_name[-3:], d.grace_seconds) for d in decision.delete_pods] == [
        ("0-0", BROKEN_GRACE_SECONDS),
        ("0-1", BROKEN_GRACE_SECONDS),
    ]
    assert decision.admission is not None
    assert [key.role for key in decision.admission.taken_back] == ["decode"]
    (note,) = decision.notes
    assert (note.reason, note.is_warning) == ("GroupTakenBack", True)
    assert "after 60 s 1 of 2 pods had a node" in note.message
    assert "0/9 nodes are available" in note.message
    (rebuild,) = world.status.rebuilds
    assert (rebuild.role, rebuild.failures) == ("decode", 0)  # no fault of the engine's


def test_until_then_it_is_waited_for() -> None:
    decision = half_placed().step(LATE - 20)
    assert (decision.delete_pods, decision.wait_seconds) == ((), 20.0)


def test_a_pod_behind_somebodys_gate_is_not_taken_back() -> None:
    decision = half_placed(reason="SchedulingGated").step(LATE + 1000)
    assert decision.delete_pods == ()


def test_a_group_that_was_taken_back_waits_and_is_then_made_again() -> None:
    world = half_placed()
    (key,) = world.step(LATE).admission.taken_back  # type: ignore[union-attr]
    world.capacity = Capacity(tuple(rack("b", 4, 4)), not_before={key: LATE + 10})
    decision = world.step(LATE + 4)
    assert not [name for name in world.pods() if "decode" in name]
    assert decision.wait_seconds == 6.0
    assert "did not find a place for all of its pods" in world.condition(names.PROGRESSING).message
    world.step(LATE + 10)
    assert world.racks()["decode-0-1"] == "b"


def test_claims_are_for_the_pods_that_are_made_where_they_are_tied_to() -> None:
    world = World([*rack("a", 4), *rack("b", 4)])
    decision = world.step()
    assert decision.admission is not None
    (claim,) = decision.admission.claims
    assert claim.group == GroupKey("prefill", decision.revisions["prefill"], 0)
    assert claim.pods == tuple(world.pods())
    assert dict(claim.shape.selector)[RACK] == "a"


@pytest.mark.parametrize("changes", [SPEC, PREFERRED, IN_ONE_RACK, {**SPEC, "spec.placement": {}}])
def test_once_settled_nothing_is_left_to_do(changes: dict[str, Any]) -> None:
    world = World(rack("a", 4, 4, 4), changes)
    world.step()
    for body in world.pods().values():
        body["status"] = ready_status()
    world.make_all_ready()
    world.step()
    decision = world.step()
    assert (decision.apply, decision.delete_pods, decision.notes) == ((), (), ())
    assert world.condition(names.READY).status == "True"
