"""What surge and unavailable come to for a role, and for roles of different sizes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.role_worlds import Wanted, World
from tests.operator.worlds import stored

from headrace_operator.leeway import Leeway, amount_of, leeway
from headrace_operator.planning import strategy_of


@pytest.mark.parametrize(
    ("max_surge", "max_unavailable", "replicas", "expected"),
    [
        (1, 0, 8, Leeway(1, 0)),  # numbers are what they say
        (0, 2, 1, Leeway(0, 2)),
        ("25%", "25%", 8, Leeway(2, 2)),
        ("25%", "25%", 3, Leeway(1, 0)),  # surge up, unavailable down
        ("25%", "25%", 1, Leeway(1, 0)),
        ("100%", "100%", 5, Leeway(5, 5)),
        (0, "25%", 3, Leeway(0, 1)),  # both come to 0: one group may be away
        (0, "25%", 4, Leeway(0, 1)),
        (0, "0%", 4, Leeway(0, 1)),
        ("1%", 0, 1000, Leeway(10, 0)),
        ("7%", "7%", 100, Leeway(7, 7)),  # 0.07 * 100 is a little more than 7 in floating point
        ("25%", "25%", 0, Leeway(0, 1)),
    ],
)
def test_amounts_are_rounded_as_a_deployments_are(
    max_surge: int | str, max_unavailable: int | str, replicas: int, expected: Leeway
) -> None:
    assert leeway(amount_of(max_surge), amount_of(max_unavailable), replicas) == expected


AMOUNTS = st.integers(0, 100) | st.integers(0, 100).map("{}%".format)


@settings(max_examples=40)
@given(AMOUNTS, AMOUNTS, st.integers(0, 1000))
def test_there_is_always_some_leeway_and_a_share_is_never_more_than_all(
    max_surge: int | str, max_unavailable: int | str, replicas: int
) -> None:
    found = leeway(amount_of(max_surge), amount_of(max_unavailable), replicas)
    assert found.max_surge + found.max_unavailable > 0
    assert isinstance(max_surge, int) or found.max_surge <= replicas
    assert isinstance(max_unavailable, int) or found.max_unavailable <= max(1, replicas)


def test_a_share_is_of_each_roles_own_groups() -> None:
    world = World(strategy_of(stored({"spec.rolloutStrategy": {"maxSurge": "25%", "maxUnavailable": "25%"}})))
    world.settle({"prefill": Wanted("a1", 8), "decode": Wanted("a1", 1)})
    plans = world.plan({"prefill": Wanted("a2", 8), "decode": Wanted("a2", 1)})
    assert {role: (len(plan.create), len(plan.leaving)) for role, plan in plans.items()} == {
        "prefill": (2, 2),
        "decode": (1, 0),
    }
