"""Charges, readiness and what survives a change of the endpoints."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace_engine.core import Role
from headrace_engine.router.fleet import Fleet, NoGroup
from headrace_engine.router.group import Charge, Endpoint


def endpoint(name: str, role: Role = Role.DECODE, ready: bool = True) -> Endpoint:
    return Endpoint(role, f"http://{name}:8000", name, ready)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_group_that_stays_keeps_its_count_and_one_that_returns_starts_anew():
    fleet = Fleet()
    fleet.replace([endpoint("a"), endpoint("b")])
    charge = fleet.dispatch(Role.DECODE, tried={"http://b:8000"})
    fleet.replace([endpoint("a")])
    assert fleet.snapshot()["decode"][0]["in_flight"] == 1
    fleet.replace([])
    fleet.replace([endpoint("a")])
    assert fleet.snapshot()["decode"][0]["in_flight"] == 0
    charge.release()
    assert fleet.snapshot()["decode"][0]["in_flight"] == 0


def test_another_pod_on_a_reused_address_does_not_inherit_failures():
    fleet = Fleet()
    fleet.replace([endpoint("a")])
    fleet.dispatch(Role.DECODE).unreachable(0.0)
    fleet.replace([Endpoint(Role.DECODE, "http://a:8000", "new-pod")])
    assert fleet.snapshot()["decode"][0]["connection_failures"] == 0


def test_one_trial_at_a_time_after_a_cool_down_and_all_requests_after_its_success():
    clock = Clock()
    fleet = Fleet(clock)
    fleet.replace([endpoint("a")])
    with fleet.dispatch(Role.DECODE) as charge:
        charge.unreachable(clock.now)
    with pytest.raises(NoGroup, match="cooling down"):
        fleet.dispatch(Role.DECODE)
    clock.now = 10.0
    trial = fleet.dispatch(Role.DECODE)
    with pytest.raises(NoGroup, match="on trial"):
        fleet.dispatch(Role.DECODE)
    trial.reached()
    fleet.dispatch(Role.DECODE)


def test_a_trial_that_ends_without_a_result_gives_way_to_another():
    clock = Clock()
    fleet = Fleet(clock)
    fleet.replace([endpoint("a")])
    fleet.dispatch(Role.DECODE).unreachable(clock.now)
    clock.now = 10.0
    fleet.dispatch(Role.DECODE).release()
    fleet.dispatch(Role.DECODE)


def test_a_failure_is_no_news_of_a_group_that_has_answered_another_leg_since():
    fleet = Fleet()
    fleet.replace([endpoint("a")])
    late, quick = fleet.dispatch(Role.DECODE), fleet.dispatch(Role.DECODE)
    quick.reached()
    late.unreachable(0.0)
    assert fleet.snapshot()["decode"][0]["connection_failures"] == 0
    quick.unreachable(0.0)  # its own stream broke, and nobody has heard of the group since
    assert fleet.snapshot()["decode"][0]["connection_failures"] == 1


def test_a_known_fingerprint_decides_without_a_refusal():
    fleet = Fleet()
    fleet.replace([endpoint("a", Role.PREFILL)])
    next(fleet.groups(Role.PREFILL)).fingerprint = "F2"
    with pytest.raises(NoGroup, match="fingerprint"):
        fleet.dispatch(Role.PREFILL, fingerprint="F1")
    fleet.dispatch(Role.PREFILL, fingerprint="F2")
    fleet.set_ready(Role.PREFILL, "http://a:8000", False)
    fleet.set_ready(Role.PREFILL, "http://a:8000", True)  # perhaps another engine
    fleet.dispatch(Role.PREFILL, fingerprint="F1")


def test_a_refused_fingerprint_is_remembered_for_a_while():
    clock = Clock()
    fleet = Fleet(clock)
    fleet.replace([endpoint("a", Role.PREFILL)])
    with fleet.dispatch(Role.PREFILL, fingerprint="F1") as charge:
        charge.group.refuse("F1", clock.now)
    with pytest.raises(NoGroup, match="fingerprint"):
        fleet.dispatch(Role.PREFILL, fingerprint="F1")
    fleet.dispatch(Role.PREFILL, fingerprint="F2")
    clock.now = 61.0
    fleet.dispatch(Role.PREFILL, fingerprint="F1")


@pytest.mark.parametrize(
    ("endpoints", "missing"),
    [
        ([], [Role.DECODE, Role.PREFILL]),
        ([endpoint("a")], [Role.PREFILL]),
        ([endpoint("a"), endpoint("b", Role.PREFILL)], []),
        ([endpoint("a"), endpoint("b", Role.PREFILL, ready=False)], [Role.PREFILL]),
        ([endpoint("a", Role.UNIFIED)], []),
        ([endpoint("a", Role.UNIFIED, ready=False)], [Role.UNIFIED]),
    ],
)
def test_what_is_missing_to_serve(endpoints, missing):
    fleet = Fleet()
    fleet.replace(endpoints)
    assert fleet.missing() == missing


class Charges(RuleBasedStateMachine):
    """Any order of dispatches, repeated releases and changes of the list."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.fleet = Fleet(self.clock)
        self.charges: list[Charge] = []

    @rule(names=st.sets(st.sampled_from("abc"), min_size=1))
    def replace(self, names: set[str]) -> None:
        self.fleet.replace([endpoint(name) for name in names])

    @rule()
    def dispatch(self) -> None:
        try:
            self.charges.append(self.fleet.dispatch(Role.DECODE))
        except NoGroup:
            pass

    @precondition(lambda self: self.charges)
    @rule(data=st.data(), times=st.integers(1, 2))
    def release(self, data: st.DataObject, times: int) -> None:
        charge = data.draw(st.sampled_from(self.charges))
        self.charges.remove(charge)
        for _ in range(times):
            charge.release()

    @precondition(lambda self: self.charges)
    @rule(data=st.data(), reached=st.booleans())
    def learn(self, data: st.DataObject, reached: bool) -> None:
        charge = data.draw(st.sampled_from(self.charges))
        if reached:
            charge.reached()
        else:
            charge.unreachable(self.clock.now)

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def a_groups_count_is_its_unreleased_charges(self) -> None:
        for group in self.fleet.groups():
            assert group.num_live == sum(charge.group is group for charge in self.charges)

    @invariant()
    def no_trial_without_a_charge_that_is_under_way(self) -> None:
        for group in self.fleet.groups():
            assert not group.on_trial or group.num_live > 0


TestCharges = Charges.TestCase
TestCharges.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
