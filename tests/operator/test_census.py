"""Keeping count of nodes and pods, and of room that was promised."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.racks import GPU

from headrace_operator import names
from headrace_operator.admission import Claim
from headrace_operator.census import Census
from headrace_operator.groups import GroupKey
from headrace_operator.ledger import CLAIM_SECONDS, Ledger
from headrace_operator.scheduling import PodShape, shape_of
from headrace_operator.workqueue import Key

OURS = {names.LABEL_MANAGED_BY: names.MANAGER, names.LABEL_GROUP: "0"}


def node(name: str = "n0", gpus: int = 4, **spec: Any) -> dict[str, Any]:
    status = {"allocatable": {GPU: str(gpus), "pods": "10"}, "conditions": [{"lastHeartbeatTime": "now"}]}
    return {"metadata": {"name": name, "labels": {}}, "spec": spec, "status": status}


def pod(
    name: str = "p",
    gpus: int = 1,
    node: str = "n0",
    phase: str = "Running",
    labels: dict[str, str] | None = None,
    uid: str = "",
    **metadata: Any,
) -> dict[str, Any]:
    container = {"name": "c", "resources": {"requests": {GPU: str(gpus)}}}
    return {
        "metadata": {"name": name, "namespace": "ns", "uid": uid or f"uid-{name}", "labels": labels or {}, **metadata},
        "spec": {"containers": [container], **({"nodeName": node} if node else {})},
        "status": {"phase": phase},
    }


def free(census: Census, claims: tuple[tuple[PodShape, int], ...] = ()) -> dict[str, int]:
    """Free GPUs by node."""
    return {room.node.name: room.free[GPU] // 1000 for room in census.rooms(claims)}


def census_with(*pods: dict[str, Any], nodes: int = 1) -> Census:
    census = Census()
    for index in range(nodes):
        census.see_node(node(f"n{index}"))
    for body in pods:
        census.see_pod(body)
    return census


def test_a_bound_pod_takes_its_requests_until_it_ends_whoever_made_it() -> None:
    census = census_with(pod(gpus=3))
    assert free(census) == {"n0": 1}
    assert not census.see_pod(pod(gpus=3, deletionTimestamp="now"))  # it still runs
    assert free(census) == {"n0": 1}
    assert census.see_pod(pod(gpus=3, phase="Succeeded"))
    assert free(census) == {"n0": 4}


def test_a_pod_that_is_gone_gives_its_room_back_once() -> None:
    census = census_with(pod())
    assert census.lose_pod(pod())
    assert not census.lose_pod(pod())
    assert free(census) == {"n0": 4}


def test_of_pods_without_a_node_only_our_own_count() -> None:
    assert free(census_with(pod(node="", phase="Pending"))) == {"n0": 4}
    census = census_with(pod(node="", phase="Pending", labels=OURS))
    assert free(census) == {"n0": 3}
    census.see_pod(pod(node="n0", phase="Pending", labels=OURS))
    assert free(census) == {"n0": 3}
    assert not census_with(pod(node="", labels=OURS, deletionTimestamp="now")).lose_pod(pod())


def test_pods_without_a_node_are_counted_where_they_leave_the_most_whole_room() -> None:
    census = census_with(pod("a", gpus=3), *(pod(f"w{i}", node="", labels=OURS) for i in range(2)), nodes=2)
    assert free(census) == {"n0": 0, "n1": 3}


def test_a_pod_of_ours_is_in_line_until_the_scheduler_has_looked_at_it() -> None:
    waiting = pod(node="", phase="Pending", labels=OURS)
    refused = {**waiting, "status": {"conditions": [{"type": "PodScheduled", "status": "False"}]}}
    for news in (refused, pod(labels=OURS)):
        census = census_with(waiting)
        assert census.unbound() == {shape_of(waiting["spec"])}
        assert census.see_pod(news)  # whoever is behind it may go
        assert census.unbound() == frozenset()
        assert not census.see_pod(news)
    assert census_with(pod(node="", phase="Pending")).unbound() == frozenset()


def test_a_heartbeat_is_no_change_and_a_cordon_is() -> None:
    census = census_with()
    assert not census.see_node(node())
    assert census.see_node(node(unschedulable=True))
    assert census.see_node(node(gpus=8))
    census.lose_node("n0")
    assert free(census) == {}


def test_what_a_new_list_does_not_show_is_forgotten() -> None:
    census = census_with(pod("a"), pod("b", labels=OURS), nodes=2)
    census.keep_only(node_names=["n0"])
    census.keep_only(pod_uids=["uid-a"])
    assert free(census) == {"n0": 3}
    assert census.uid_of("ns", "b") is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["seen", "bound", "ended", "gone"])), max_size=20))
def test_any_order_of_news_ends_in_the_same_count(news: list[tuple[str, str]]) -> None:
    census, last = census_with(), {}
    for name, what in news:
        body = pod(name, node="n0" if what == "bound" else "", phase="Failed" if what == "ended" else "Pending")
        census.lose_pod(body) if what == "gone" else census.see_pod(body)
        last[name] = what
    assert free(census) == {"n0": 4 - sum(what == "bound" for what in last.values())}


KEY = Key("ns", "demo")
GROUP = GroupKey("decode", "new", 0)
SHAPE = shape_of(pod(gpus=2)["spec"])


def claim(*pods: str) -> list[Claim]:
    return [Claim(GROUP, pods, SHAPE)]


def counts(ledger: Ledger, census: Census, now: float) -> list[int]:
    return [claim.count for claim in ledger.open_claims(census.uid_of, now)]


def test_a_claim_holds_room_until_each_of_its_pods_is_seen() -> None:
    census, ledger = census_with(), Ledger()
    ledger.claim(KEY, claim("p0", "p1"), census.uid_of, now=0.0)
    assert counts(ledger, census, now=1.0) == [2]
    assert free(census, ((SHAPE, 2),)) == {"n0": 0}
    census.see_pod(pod("p0", node="", labels=OURS))
    assert counts(ledger, census, now=1.0) == [1]
    census.see_pod(pod("p1", node="", labels=OURS))
    assert counts(ledger, census, now=1.0) == []


def test_a_pod_of_the_same_name_as_before_is_not_taken_for_the_new_one() -> None:
    census, ledger = census_with(pod("p0", labels=OURS, uid="old")), Ledger()
    ledger.claim(KEY, claim("p0"), census.uid_of, now=0.0)
    assert counts(ledger, census, now=1.0) == [1]
    census.see_pod(pod("p0", node="", labels=OURS, uid="new"))
    census.lose_pod(pod("p0", labels=OURS, uid="old"))
    assert counts(ledger, census, now=1.0) == []


def test_a_claim_whose_pods_never_come_is_given_back() -> None:
    ledger = Ledger()
    ledger.claim(KEY, claim("p0"), lambda *_: None, now=0.0)
    assert ledger.open_claims(lambda *_: None, now=CLAIM_SECONDS) == []
    ledger.claim(KEY, claim("p0"), lambda *_: None, now=0.0)
    ledger.release(KEY)
    assert ledger.open_claims(lambda *_: None, now=1.0) == []


def test_what_is_held_is_claimed_anew_by_each_pass_and_what_is_on_its_way_is_not() -> None:
    ledger, nobody = Ledger(), lambda *_: None
    other = GroupKey("prefill", "new", 0)
    held = Claim(other, ("q0",), SHAPE, is_held=True)
    ledger.claim(KEY, [*claim("p0"), held], nobody, now=0.0)
    assert [c.is_held for c in ledger.open_claims(nobody, now=1.0)] == [False, True]
    ledger.claim(KEY, [], nobody, now=1.0)
    assert [c.is_held for c in ledger.open_claims(nobody, now=1.0)] == [False]


def test_groups_taken_back_wait_twice_as_long_each_time_and_start_anew_after_a_while() -> None:
    ledger, now, waits = Ledger(), 0.0, []
    for _ in range(8):
        ledger.take_back(KEY, [GROUP], now)
        waits.append(ledger.not_before(KEY)[GROUP] - now)
        now += 400.0
    assert waits == [10, 20, 40, 80, 160, 300, 300, 300]
    ledger.take_back(KEY, [GROUP], now + 3600)
    assert ledger.not_before(KEY)[GROUP] == now + 3610
    ledger.forget(KEY)
    assert ledger.not_before(KEY) == {}
