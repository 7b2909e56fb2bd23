"""Deployments that share racks, through whole histories, with a scheduler that spreads pods as badly as it may.

As long as nobody else's pods land in between, whatever the operator makes finds its nodes.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.rack_worlds import SAME_RACK, Racks, spec

from headrace_operator import names

specs = st.builds(
    spec,
    st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 4])),
    st.tuples(st.integers(1, 2), st.integers(1, 2), st.sampled_from([2, 4])),
    st.sampled_from([SAME_RACK, {"group": "SameDomain", "deployment": "SameDomain"}]),
)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(2, 4), min_size=1, max_size=2), specs, specs, st.data(), st.integers(0, 99))
def test_whatever_is_made_finds_its_nodes_and_the_rest_says_why_it_waits(
    nodes_per_rack: list[int], one: dict[str, Any], two: dict[str, Any], data: st.DataObject, seed: int
) -> None:
    racks = Racks(nodes_per_rack, seed)
    racks.want("one", one)
    racks.want("two", two)
    racks.settle()
    changed = {
        "spec.roles.0.replicas": data.draw(st.integers(0, 4)),
        "spec.roles.1.replicas": data.draw(st.integers(0, 2)),
    }
    racks.want("one", {**one, **changed})
    racks.settle()
    racks.check_racks()
    for name, deployment in racks.wanted.items():
        wanted = {role.name: role.replicas for role in deployment.spec.roles}
        is_whole = racks.groups(name) == wanted
        assert racks.reason(name) == (names.REASON_SETTLED if is_whole else names.REASON_NO_CAPACITY)


@pytest.mark.parametrize("seed", range(6))
def test_small_pods_do_not_spread_into_the_room_of_large_ones(seed: int) -> None:
    racks = Racks([3], seed)
    racks.want("one", spec((4, 1), (1, 2, 4), SAME_RACK))
    racks.settle()
    assert racks.groups("one") == {"prefill": 4, "decode": 1}


@pytest.mark.parametrize("seed", range(6))
def test_of_two_that_want_the_last_room_one_gets_it(seed: int) -> None:
    racks = Racks([4], seed)
    for name in ("one", "two"):
        racks.want(name, spec((1, 4), (1, 2, 4), SAME_RACK))
    racks.settle()
    assert sorted(racks.groups(name)["decode"] for name in ("one", "two")) == [0, 1]


def test_8p1d_becomes_4p2d_on_one_full_rack_within_the_gpus_that_there_are() -> None:
    racks = Racks([16], seed=1)
    racks.want("flash", spec((8, 4), (1, 8, 4), SAME_RACK))
    racks.settle()
    assert racks.groups("flash") == {"prefill": 8, "decode": 1}
    racks.want("flash", spec((4, 4), (2, 4, 4), SAME_RACK))
    racks.settle()
    assert racks.groups("flash") == {"prefill": 4, "decode": 2}
