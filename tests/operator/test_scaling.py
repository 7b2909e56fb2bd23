"""Scaling from outside: whose word counts, what a scaler is made with, and how ratios cut wishes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.test_reconcile import FakeServer, reconciler, settle
from tests.operator.worlds import FakeCluster, stored

from headrace_operator import names
from headrace_operator.drift import status_has_drifted
from headrace_operator.observe import observe
from headrace_operator.scaling import scaled, scaler_status
from headrace_operator.status import as_applied
from headrace_operator.workqueue import Key

KEY = Key("default", "demo")
EXTERNAL = {"spec.scaling": {"mode": "External"}}


def external(ratio: dict[str, Any] | None = None, **replicas: int) -> dict[str, Any]:
    """Changes of a resource that is scaled from outside."""
    changes: dict[str, Any] = {"spec.scaling": {"mode": "External", **({"ratio": ratio} if ratio else {})}}
    return changes | {f"spec.roles.{['prefill', 'decode'].index(role)}.replicas": n for role, n in replicas.items()}


def scaler(cluster: FakeCluster, role: str) -> dict[str, Any]:
    return cluster.objects[names.SCALER_KIND, f"demo-{role}"]


def wish(cluster: FakeCluster, role: str, replicas: int) -> None:
    """What an autoscaler does through /scale."""
    scaler(cluster, role)["spec"]["replicas"] = replicas


def groups(cluster: FakeCluster, role: str) -> int:
    return len({pod["metadata"]["labels"][names.LABEL_GROUP] for n, pod in cluster.pods().items() if f"-{role}-" in n})


def test_static_makes_no_scalers() -> None:
    cluster = FakeCluster()
    cluster.settle(stored())
    assert not [kind for kind, _ in cluster.objects if kind == names.SCALER_KIND]
    assert names.SCALING_LIMITED not in {condition.type for condition in cluster.status.conditions}


def test_a_new_deployments_scalers_start_at_the_specs_counts() -> None:
    cluster = FakeCluster()
    cluster.settle(stored(external(prefill=3, decode=2)))
    assert [scaler(cluster, role)["spec"]["replicas"] for role in ("prefill", "decode")] == [3, 2]
    assert (groups(cluster, "prefill"), groups(cluster, "decode")) == (3, 2)


def test_a_scaler_is_owned_by_its_deployment_and_found_by_its_labels() -> None:
    cluster = FakeCluster()
    cluster.settle(stored(EXTERNAL))
    metadata = scaler(cluster, "decode")["metadata"]
    assert metadata["ownerReferences"][0]["kind"] == names.KIND
    assert metadata["labels"][names.LABEL_ROLE] == "decode"


def test_the_groups_follow_the_scaler_and_not_the_spec() -> None:
    cluster = FakeCluster()
    cluster.settle(stored(EXTERNAL))
    wish(cluster, "decode", 5)
    cluster.settle(stored(external(decode=2), generation=2))
    assert groups(cluster, "decode") == 5
    wish(cluster, "decode", 1)
    cluster.settle(stored(external(decode=2), generation=2))
    assert groups(cluster, "decode") == 1
    assert scaler(cluster, "decode")["spec"]["replicas"] == 1


def test_a_resource_applied_again_without_replicas_keeps_the_scalers_count() -> None:
    cluster = FakeCluster()
    cluster.settle(stored(external(decode=4)))
    wish(cluster, "decode", 5)
    for _ in range(50):
        cluster.settle(stored(EXTERNAL, generation=2))
    assert scaler(cluster, "decode")["spec"]["replicas"] == groups(cluster, "decode") == 5


def test_from_static_to_external_the_present_count_is_the_seed() -> None:
    cluster = FakeCluster()
    cluster.settle(stored({"spec.roles.1.replicas": 4}))
    cluster.settle(stored(EXTERNAL, generation=2))  # whose replicas are not written, so 1 by default
    assert scaler(cluster, "decode")["spec"]["replicas"] == groups(cluster, "decode") == 4


def test_from_external_to_static_the_scalers_go_and_the_spec_counts() -> None:
    cluster = FakeCluster()
    cluster.settle(stored(EXTERNAL))
    wish(cluster, "decode", 4)
    cluster.settle(stored(EXTERNAL))
    live = as_applied(cluster.status)
    cluster.settle(stored({"spec.roles.1.replicas": 2}, generation=2))
    assert groups(cluster, "decode") == 2
    assert not [kind for kind, _ in cluster.objects if kind == names.SCALER_KIND]
    assert status_has_drifted(live, as_applied(cluster.status)), "the condition of the other mode must be taken back"


def test_a_deleted_scaler_comes_back_with_the_present_count() -> None:
    cluster = FakeCluster()
    cluster.settle(stored(EXTERNAL))
    wish(cluster, "prefill", 3)
    cluster.settle(stored(EXTERNAL))
    del cluster.objects[names.SCALER_KIND, "demo-prefill"]
    cluster.settle(stored(EXTERNAL))
    assert scaler(cluster, "prefill")["spec"]["replicas"] == groups(cluster, "prefill") == 3


def test_a_scaler_never_starts_at_zero() -> None:
    cluster = FakeCluster()
    cluster.settle(stored({"spec.roles.1.replicas": 0}))
    cluster.settle(stored(EXTERNAL, generation=2))
    assert scaler(cluster, "decode")["spec"]["replicas"] == 1


def test_zero_is_respected_when_somebody_asks_for_it() -> None:
    cluster = FakeCluster()
    cluster.settle(stored(EXTERNAL))
    wish(cluster, "decode", 0)
    cluster.settle(stored(EXTERNAL))
    assert groups(cluster, "decode") == 0
    available = next(c for c in cluster.status.conditions if c.type == names.AVAILABLE)
    assert available.reason == names.REASON_SCALED_TO_ZERO


def test_its_status_counts_groups_and_selects_leaders() -> None:
    cluster = FakeCluster()
    cluster.settle(stored(external(decode=3) | {"spec.roles.1.parallelism": {"data": 2, "dataLocal": 1}}))
    status = scaler_status(
        "demo", "decode", observe("demo", "11111111-1111-1111-1111-111111111111", cluster.objects.values())
    )
    assert status.replicas == 3
    wanted = dict(term.split("=") for term in status.selector.split(","))
    chosen = [pod for pod in cluster.pods().values() if wanted.items() <= pod["metadata"]["labels"].items()]
    assert len(chosen) == 3


# --- ratios ---


@pytest.mark.parametrize(
    ("prefill", "decode", "granted"),
    [
        (4, 1, (4, 1)),
        (5, 1, (4, 1)),  # more than 4:1: prefill is cut
        (9, 2, (8, 2)),
        (1, 2, (1, 2)),
        (1, 3, (1, 2)),  # less than 1:2: decode is cut
        (3, 9, (3, 6)),
        (9, 40, (9, 18)),
        (0, 3, (0, 3)),  # nothing is served, so nothing is bound
        (7, 0, (7, 0)),
    ],
)
def test_wishes_are_cut_to_the_bounds(prefill: int, decode: int, granted: tuple[int, int]) -> None:
    ratio = {"min": {"prefill": 1, "decode": 2}, "max": {"prefill": 4, "decode": 1}}
    cluster = FakeCluster()
    cluster.settle(stored(external(ratio)))
    wish(cluster, "prefill", prefill)
    wish(cluster, "decode", decode)
    cluster.settle(stored(external(ratio)))
    assert (groups(cluster, "prefill"), groups(cluster, "decode")) == granted
    limited = next(c for c in cluster.status.conditions if c.type == names.SCALING_LIMITED)
    assert (limited.status == "True") == (granted != (prefill, decode))


def test_a_cut_says_what_was_wished_and_which_bound_it_met() -> None:
    ratio = {"max": {"prefill": 2, "decode": 1}}
    cluster = FakeCluster()
    cluster.settle(stored(external(ratio)))
    wish(cluster, "prefill", 5)
    decision = cluster.run(stored(external(ratio)))
    limited = next(c for c in cluster.status.conditions if c.type == names.SCALING_LIMITED)
    assert limited.reason == names.REASON_RATIO_BOUND
    assert limited.message == (
        "prefill is wished at 5 groups and has 2: scaling.ratio.max is 2:1 (prefill:decode) and decode has 1"
    )
    assert names.SCALING_LIMITED in {note.reason for note in decision.notes}
    assert names.SCALING_LIMITED not in {note.reason for note in cluster.run(stored(external(ratio))).notes}


BOUNDS = st.builds(lambda prefill, decode: {"prefill": prefill, "decode": decode}, st.integers(1, 9), st.integers(1, 9))


@settings(max_examples=60, deadline=None)
@given(low=BOUNDS, high=BOUNDS, prefill=st.integers(1, 40), decode=st.integers(1, 40))
def test_cuts_only_take_away_and_end_within_the_bounds(
    low: dict[str, int], high: dict[str, int], prefill: int, decode: int
) -> None:
    if low["prefill"] * high["decode"] > high["prefill"] * low["decode"]:
        low, high = high, low
    deployment = stored(external({"min": low, "max": high}, prefill=prefill, decode=decode))
    result = scaled(deployment, observe("demo", "", []), FakeCluster().status, 0.0)
    got = {role.name: role.replicas for role in result.deployment.spec.roles}
    assert 1 <= got["prefill"] <= prefill
    assert 1 <= got["decode"] <= decode
    assert (got["prefill"] < prefill) + (got["decode"] < decode) == len(result.cuts)
    if got["prefill"] > 1:
        assert got["prefill"] * high["decode"] <= high["prefill"] * got["decode"]
    if got["decode"] > 1:
        assert got["prefill"] * low["decode"] >= low["prefill"] * got["decode"]


# --- what is written ---


async def test_a_scaler_is_created_once_its_status_kept_and_its_spec_never_written() -> None:
    server = FakeServer(EXTERNAL)
    subject = reconciler(server)
    await subject.reconcile(KEY)
    assert server.calls.count(f"create {names.SCALER_KIND}") == 2
    await settle(server, subject)
    demo = server.world.objects[names.SCALER_KIND, "demo-decode"]
    assert demo["status"]["replicas"] == 1
    demo["spec"]["replicas"] = 3
    server.calls.clear()
    await subject.reconcile(KEY)
    await subject.reconcile(KEY)
    assert [call for call in server.calls if "Scaler" in call] == [f"status {names.SCALER_KIND}"]
    assert demo["spec"]["replicas"] == 3


async def test_a_scalers_lost_label_is_given_back_without_its_spec() -> None:
    server = FakeServer(EXTERNAL)
    subject = reconciler(server)
    await settle(server, subject)
    del server.world.objects[names.SCALER_KIND, "demo-decode"]["metadata"]["labels"][names.LABEL_COMPONENT]
    server.world.objects[names.SCALER_KIND, "demo-decode"]["spec"]["replicas"] = 7
    await settle(server, subject)
    demo = server.world.objects[names.SCALER_KIND, "demo-decode"]
    assert demo["metadata"]["labels"][names.LABEL_COMPONENT] == "decode"
    assert demo["spec"]["replicas"] == 7


async def test_a_scaler_that_no_watch_has_shown_yet_is_not_overwritten() -> None:
    server = FakeServer(EXTERNAL)
    subject = reconciler(server)
    await settle(server, subject)
    demo = server.world.objects[names.SCALER_KIND, "demo-decode"]
    demo["spec"]["replicas"] = 7
    shown = [body for body in server.world.objects.values() if body is not demo]
    server.shown, server.is_lagging = shown, True
    await reconciler(server).reconcile(KEY)
    assert demo["spec"]["replicas"] == 7
