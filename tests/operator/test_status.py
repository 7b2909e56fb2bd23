"""Status: which reason is given for what, and what stays still when nothing changes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.operator.worlds import FakeCluster, pod_status, stored

from headrace_operator import names
from headrace_operator.api_status import Condition, Status
from headrace_operator.drift import status_has_drifted
from headrace_operator.status import as_applied, invalid_status

DEP2 = {"spec.roles.1.parallelism": {"data": 2, "dataLocal": 1, "expert": True}}
FAILED = pod_status("Failed", state={"terminated": {"exitCode": 1, "reason": "Error", "message": "no memory"}})


def condition(cluster: FakeCluster, kind: str) -> Condition:
    return next(c for c in cluster.status.conditions if c.type == kind)


def settled() -> FakeCluster:
    cluster = FakeCluster()
    cluster.settle(stored(DEP2))
    return cluster


def decode_pods(cluster: FakeCluster) -> list[dict[str, Any]]:
    return [pod for name, pod in sorted(cluster.pods().items()) if "decode" in name]


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (pod_status("Pending", state={"waiting": {"reason": "ErrImagePull"}}), names.REASON_IMAGE_PULL),
        (pod_status(started=True, ready=False), names.REASON_PROBE_FAILING),
        (pod_status(started=False, ready=False), names.REASON_WAITING_FOR_GROUP),
        ({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False"}]}, names.REASON_UNSCHEDULABLE),
        (FAILED, names.REASON_REBUILDING),
    ],
)
def test_the_reason_of_one_pod_becomes_the_reason_of_the_deployment(status: dict[str, Any], reason: str) -> None:
    cluster = settled()
    decode_pods(cluster)[1]["status"] = status
    cluster.run(stored(DEP2))
    ready = condition(cluster, names.READY)
    assert (ready.status, ready.reason) == ("False", reason)
    assert "decode group 0 of 1" in ready.message
    assert "prefill 1/1 groups ready, decode 0/1 groups ready" in ready.message
    assert condition(cluster, names.AVAILABLE).status == "False"
    assert cluster.status.summary is not None
    assert cluster.status.summary.reason.startswith(f"{reason}: ")


def test_counts_are_of_groups_not_pods() -> None:
    cluster = settled()
    decode_pods(cluster)[1]["status"] = pod_status(started=False)
    cluster.run(stored(DEP2))
    decode = next(role for role in cluster.status.roles if role.name == "decode")
    assert (decode.groups, decode.ready_groups, decode.updated_groups) == (1, 0, 1)


def test_repeated_failures_are_a_crash_loop_with_the_last_words() -> None:
    cluster = settled()
    now = 0.0
    for _ in range(3):
        decode_pods(cluster)[0]["status"] = FAILED
        cluster.run(stored(DEP2), now)  # gives the group up
        now += 100.0
        cluster.run(stored(DEP2), now)  # makes it again
    cluster.run(stored(DEP2), now)
    ready = condition(cluster, names.READY)
    assert ready.reason == names.REASON_CRASH_LOOP
    assert "failed 3 times in a row" in ready.message
    assert "no memory" in ready.message


def test_old_groups_do_not_make_a_new_revision_ready() -> None:
    cluster = settled()
    cluster.run(stored({**DEP2, "spec.engine": {"maxSequences": 8}}, generation=2))
    ready = condition(cluster, names.READY)
    assert (ready.status, ready.observed_generation) == ("False", 2)
    assert condition(cluster, names.PROGRESSING).reason == names.REASON_ROLLING_OUT
    assert cluster.status.observed_generation == 2


def test_a_new_group_that_has_not_been_ready_for_long_enough_does_not_make_it_ready() -> None:
    """Old and new are both ready then, and nothing is wrong with either."""
    cluster = settled()
    surge = {"maxSurge": 1, "maxUnavailable": 0, "minReadySeconds": 30}
    changed = stored({**DEP2, "spec.engine": {"maxSequences": 8}, "spec.rolloutStrategy": surge}, generation=2)
    cluster.run(changed, now=10.0)  # makes the new groups
    cluster.make_all_ready()
    for pod in cluster.pods().values():
        (ready,) = [c for c in pod["status"]["conditions"] if c["type"] == "Ready"]
        ready["lastTransitionTime"] = "1970-01-01T00:00:10Z"
    cluster.run(changed, now=20.0)
    ready = condition(cluster, names.READY)
    assert (ready.status, ready.reason) == ("False", names.REASON_ROLLING_OUT)
    assert [role.updated_groups for role in cluster.status.roles] == [0, 0]
    cluster.settle(changed, now=50.0)
    assert condition(cluster, names.READY).status == "True"


def test_a_router_that_is_about_to_change_is_not_ready() -> None:
    """A watcher of generation 2 must not see Ready from counts of the router of generation 1."""
    cluster = settled()
    changed = stored({**DEP2, "spec.router": {"image": "router:2"}}, generation=2)
    cluster.run(changed)
    ready = condition(cluster, names.READY)
    assert (ready.status, ready.reason, ready.observed_generation) == ("False", names.REASON_ROUTER_NOT_READY, 2)
    cluster.make_all_ready()
    cluster.run(changed)
    assert condition(cluster, names.READY).status == "True"


@pytest.mark.parametrize("changes", [{"spec.roles.0.replicas": 0}, {"spec.router": {"replicas": 0}}])
def test_what_is_scaled_to_zero_is_as_wanted_and_not_available(changes: dict[str, Any]) -> None:
    cluster = FakeCluster()
    cluster.settle(stored(changes))
    assert condition(cluster, names.READY).status == "True"
    available = condition(cluster, names.AVAILABLE)
    assert (available.status, available.reason) == ("False", names.REASON_SCALED_TO_ZERO)


def test_a_router_scaled_to_zero_is_as_wanted_once_it_is_gone() -> None:
    cluster = settled()
    changed = stored({**DEP2, "spec.router": {"replicas": 0}}, generation=2)
    decision = cluster.run(changed)
    assert {deletion.kind for deletion in decision.delete_children} == {
        "Deployment", "Service", "ServiceAccount", "Role", "RoleBinding"
    }  # fmt: skip
    ready = condition(cluster, names.READY)
    assert (ready.status, "Deployment demo-router is being removed" in ready.message) == ("False", True)
    cluster.settle(changed)
    assert condition(cluster, names.READY).status == "True"
    assert ("Service", "demo") not in cluster.objects


def test_a_status_of_a_thousand_failed_groups_can_be_stored() -> None:
    cluster = FakeCluster()
    wanted = stored({"spec.roles.0.replicas": 1000, "spec.roles.1.replicas": 1000})
    cluster.run(wanted)
    tail = "x" * 900
    for pod in cluster.pods().values():
        pod["status"] = pod_status("Failed", state={"terminated": {"exitCode": 1, "message": tail}})
    cluster.run(wanted)
    assert len(cluster.status.rebuilds) == 2000
    assert len(json.dumps(as_applied(cluster.status))) < 1_000_000  # etcd takes 1.5 MB


def test_what_the_api_server_refuses_is_said() -> None:
    cluster = FakeCluster()
    cluster.run(stored(), refusals=("apply Pod demo-0: exceeded quota", "apply Pod demo-1: exceeded quota"))
    for kind in (names.READY, names.PROGRESSING):
        assert condition(cluster, kind).reason == names.REASON_REFUSED
        assert "exceeded quota (and 1 more)" in condition(cluster, kind).message


def test_times_move_only_when_a_condition_flips() -> None:
    cluster = settled()
    cluster.run(stored(DEP2), now=50.0)
    first = condition(cluster, names.READY).last_transition_time
    assert first.startswith("1970-01-01T00:00:00")
    decode_pods(cluster)[0]["status"] = pod_status(started=True, ready=False)
    cluster.run(stored(DEP2), now=60.0)
    assert condition(cluster, names.READY).last_transition_time == "1970-01-01T00:01:00.000000Z"
    assert condition(cluster, names.VALID).last_transition_time == first


def test_the_same_status_is_not_written_again() -> None:
    cluster = settled()
    cluster.run(stored(DEP2))
    live = as_applied(cluster.status)
    cluster.run(stored(DEP2), now=1000.0)
    assert not status_has_drifted(live, as_applied(cluster.status))


def test_conditions_of_others_are_no_difference() -> None:
    wanted = as_applied(settled().status)
    live = {**wanted, "conditions": [*wanted["conditions"], {"type": "Approved", "status": "True"}]}
    assert not status_has_drifted(live, wanted)
    assert status_has_drifted({**live, "conditions": live["conditions"][1:]}, wanted)


def test_an_invalid_spec_keeps_the_counts_and_says_why() -> None:
    before = settled().status
    status = invalid_status(before, 5, "spec.roles: prefill and decode together", now=9.0)
    assert status.roles == before.roles
    by_type = {c.type: c for c in status.conditions}
    assert by_type[names.VALID].status == "False"
    assert by_type[names.VALID].message == "spec.roles: prefill and decode together"
    assert by_type[names.AVAILABLE].status == "True"  # what runs still serves
    live = as_applied(status)
    again = invalid_status(Status.model_validate(live), 5, "spec.roles: prefill and decode together", now=99.0)
    assert not status_has_drifted(live, as_applied(again))


def test_unified_groups_count_for_both_phases() -> None:
    cluster = FakeCluster()
    cluster.settle(stored({"spec.roles": [{"name": "unified", "replicas": 2}]}))
    summary = cluster.status.summary
    assert summary is not None
    assert (summary.prefill, summary.decode, summary.topology) == ("2/2", "2/2", "2xDP1 unified")


STUCK = {"spec.rolloutStrategy": {"progressDeadlineSeconds": 100}, "spec.engine": {"maxSequences": 8}}


def test_a_change_that_does_not_advance_in_time_is_called_stuck_and_goes_on() -> None:
    cluster = FakeCluster()
    cluster.settle(stored())
    assert cluster.status.progress is None
    changed = stored(STUCK, generation=2)
    cluster.run(changed, now=10.0)
    cluster.run(changed, now=20.0)  # the new pods are made, and never get ready
    cluster.run(changed, now=119.0)
    assert condition(cluster, names.PROGRESSING).status == "True"
    cluster.run(changed, now=125.0)
    progressing = condition(cluster, names.PROGRESSING)
    assert (progressing.status, progressing.reason) == ("False", names.REASON_DEADLINE)
    assert "nothing has advanced for 100 s" in progressing.message
    cluster.make_all_ready()
    cluster.settle(changed, now=130.0)
    assert condition(cluster, names.PROGRESSING).reason == names.REASON_SETTLED
    assert cluster.status.progress is None


def test_a_group_that_crashes_again_and_again_is_no_progress() -> None:
    cluster = FakeCluster()
    cluster.settle(stored())
    changed = stored({**STUCK, "spec.restartPolicy": {"maxRestarts": 100}}, generation=2)
    for second in range(10, 140, 2):
        cluster.run(changed, now=float(second))
        for pod in cluster.pods().values():
            if not pod.get("status"):
                pod["status"] = FAILED
    assert condition(cluster, names.PROGRESSING).reason == names.REASON_DEADLINE


def test_a_paused_rollout_is_not_progressing_and_never_late() -> None:
    cluster = FakeCluster()
    cluster.settle(stored())
    paused = stored({**STUCK, "spec.paused": True}, generation=2)
    cluster.run(paused, now=10.0)
    cluster.run(paused, now=500.0)
    for kind in (names.READY, names.PROGRESSING):
        assert (condition(cluster, kind).status, condition(cluster, kind).reason) == ("False", names.REASON_PAUSED)
    assert condition(cluster, names.AVAILABLE).status == "True"


def test_a_partition_that_is_reached_is_ready() -> None:
    cluster = FakeCluster()
    three = {"spec.roles.0.replicas": 3, "spec.roles.1.replicas": 3}
    cluster.settle(stored(three))
    canary = {**three, "spec.engine": {"maxSequences": 8}, "spec.rolloutStrategy": {"partition": 2}}
    cluster.settle(stored(canary, generation=2))
    assert [role.updated_groups for role in cluster.status.roles] == [1, 1]
    assert condition(cluster, names.READY).status == "True"
