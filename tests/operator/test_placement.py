"""Which domain each group gets, as a table; that what is given out is really there, as a property."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.racks import GPU, RACK, gpus, group, rack, room

from headrace_operator.api_placement import Placement
from headrace_operator.capacity import Demand, GroupShape, Room, pack
from headrace_operator.groups import GroupKey
from headrace_operator.placement import Allotment, Pins, Wish, allot
from headrace_operator.scheduling import HOSTNAME
from headrace_operator.shortage import shortage

DEP32 = group(8, 4)  # 8 pods of 4 GPUs
DEP4 = group(1, 4)
ANY = Placement()
GROUP = Placement(group="SameDomain")
NODE = Placement(group="SameNode")
DEPLOYMENT = Placement(deployment="SameDomain")


def wishes(role: str, shape: GroupShape, count: int) -> list[Wish]:
    return [Wish(GroupKey(role, "new", index), shape) for index in range(count)]


def given_out(allotment: Allotment, label: str = RACK) -> dict[str, str | None]:
    """Domain of every group that got one: `decode-0: rack-a`."""
    return {f"{key.role}-{key.index}": dict(pins.labels).get(label) for key, pins in allotment.pins.items()}


EIGHT_P_ONE_D = [*wishes("prefill", DEP4, 8), *wishes("decode", DEP32, 1)]


@pytest.mark.parametrize("placement", [ANY, GROUP, DEPLOYMENT])
def test_8p1d_fits_on_exactly_as_many_nodes_as_it_needs(placement: Placement) -> None:
    allotment = allot(placement, EIGHT_P_ONE_D, None, rack("a", *[4] * 16))
    assert len(allotment.pins) == 9
    assert not allotment.waiting
    assert sum(room.free[GPU] for room in allotment.rooms) == 0


def test_a_group_goes_to_the_domain_that_it_leaves_least_room_in() -> None:
    rooms = [*rack("a", *[4] * 18), *rack("b", *[4] * 9), *rack("c", *[4] * 7)]
    assert given_out(allot(GROUP, wishes("decode", DEP32, 1), None, rooms)) == {"decode-0": "b"}


def test_groups_of_equal_choice_go_by_name() -> None:
    rooms = [*rack("b", *[4] * 8), *rack("a", *[4] * 8)]
    assert given_out(allot(GROUP, wishes("decode", DEP32, 2), None, rooms)) == {"decode-0": "a", "decode-1": "b"}


def test_the_largest_pods_choose_first() -> None:
    rooms = rack("a", 4, 3)
    small, large = wishes("prefill", group(1, 1), 3), wishes("decode", group(1, 4), 1)
    assert not allot(GROUP, [*small, *large], None, rooms).waiting


def test_a_group_is_not_split_over_domains_that_only_together_have_room() -> None:
    rooms = [*rack("a", *[4] * 7), *rack("b", *[4] * 7)]
    allotment = allot(GROUP, wishes("decode", DEP32, 1), None, rooms)
    assert given_out(allotment) == {}
    assert [w.key.index for w in allotment.waiting] == [0]
    assert given_out(allot(ANY, wishes("decode", DEP32, 1), None, rooms)) == {"decode-0": None}


def test_what_does_not_fit_waits_and_the_rest_is_made() -> None:
    allotment = allot(GROUP, wishes("prefill", DEP4, 5), None, rack("a", 4, 4, 4))
    assert len(allotment.pins) == 3
    assert len(allotment.waiting) == 2


def test_a_group_on_one_node_is_tied_to_that_node() -> None:
    allotment = allot(NODE, wishes("prefill", group(2, 2), 3), None, rack("a", 4, 8, 6, 3))
    assert given_out(allotment, HOSTNAME) == {"prefill-0": "a-0", "prefill-1": "a-1", "prefill-2": "a-2"}


def test_a_deployment_starts_only_where_all_of_it_fits() -> None:
    rooms = [*rack("a", *[4] * 15), *rack("b", *[4] * 16)]
    assert set(given_out(allot(DEPLOYMENT, EIGHT_P_ONE_D, None, rooms)).values()) == {"b"}
    assert allot(DEPLOYMENT, EIGHT_P_ONE_D, None, rooms[:-1]).pins == {}


def test_a_deployment_grows_only_where_it_is() -> None:
    rooms = [*rack("a", 4), *rack("b", 4, 4)]
    allotment = allot(DEPLOYMENT, wishes("prefill", DEP4, 2), "a", rooms)
    assert given_out(allotment) == {"prefill-0": "a"}


def test_groups_on_one_node_each_all_in_one_domain() -> None:
    both = Placement(group="SameNode", deployment="SameDomain")
    rooms = [*rack("a", 4, 2, 2), *rack("b", 4, 4)]
    allotment = allot(both, wishes("prefill", group(2, 2), 2), None, rooms)
    assert set(given_out(allotment).values()) == {"b"}
    assert set(given_out(allotment, HOSTNAME).values()) == {"b-0", "b-1"}


def test_a_preference_is_followed_where_there_is_room_and_given_up_where_not() -> None:
    prefer = Placement(group="SameDomain", enforcement="Preferred")
    rooms = [*rack("a", 4, 4), *rack("b", 4, 4, 4)]
    allotment = allot(prefer, wishes("decode", group(2, 4), 3), None, rooms)
    assert list(given_out(allotment).values()) == ["a", "b"]
    assert not any(pins.is_required for pins in allotment.pins.values())
    assert len(allotment.waiting) == 1
    rooms = [*rack("a", 4), *rack("b", 4)]
    assert allot(prefer, wishes("decode", group(2, 4), 1), None, rooms).pins == {
        GroupKey("decode", "new", 0): Pins((), is_required=False)
    }


def test_nodes_outside_every_domain_are_not_used() -> None:
    rooms = [room("n0", gpus(4)), room("n1", gpus(4))]
    assert not allot(GROUP, wishes("decode", group(1, 4), 1), None, rooms).pins


racks = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=3)
groups = st.builds(group, st.integers(1, 3), st.integers(1, 4))
placements = st.sampled_from([ANY, GROUP, NODE, DEPLOYMENT, Placement(group="SameNode", deployment="SameDomain")])


@settings(max_examples=80, deadline=None)
@given(racks, st.tuples(groups, st.integers(0, 3)), st.tuples(groups, st.integers(0, 2)), placements)
def test_what_is_given_out_fits_together_where_it_is_pinned(
    free: list[list[int]], prefill: tuple[GroupShape, int], decode: tuple[GroupShape, int], placement: Placement
) -> None:
    rooms = [there for i, counts in enumerate(free) for there in rack(f"rack-{i}", *counts)]
    wanted = [*wishes("prefill", *prefill), *wishes("decode", *decode)]
    allotment = allot(placement, wanted, None, rooms)
    shapes = {wish.key: wish.shape for wish in wanted}
    by_pins: dict[tuple[tuple[str, str], ...], list[Demand]] = {}
    for key, pins in allotment.pins.items():
        by_pins.setdefault(pins.labels, []).append(Demand(shapes[key].pod, shapes[key].num_pods))
    for labels, demands in by_pins.items():
        within = [there for there in rooms if all(there.node.labels.get(k) == v for k, v in labels)]
        assert pack(within, demands) is not None
    if placement.deployment == "SameDomain":
        assert len({dict(labels)[RACK] for labels in by_pins}) <= 1
        assert not allotment.pins or not allotment.waiting
    assert len(allotment.pins) + len(allotment.waiting) == len(wanted)
    assert all(amount >= 0 for there in allotment.rooms for amount in there.free.values())
    assert allot(placement, wanted, None, rooms) == allotment
    check_that_those_who_wait_must(placement, allotment, wanted, rooms)


def check_that_those_who_wait_must(
    placement: Placement, allotment: Allotment, wanted: list[Wish], rooms: list[Room]
) -> None:
    """None who waits has a place beside those that have one; and all of a deployment at once, if it may be anywhere."""
    if not allotment.waiting:
        return
    if placement == ANY:
        assert pack(rooms, [Demand(wish.shape.pod, wish.shape.num_pods) for wish in wanted]) is None
    left = {there.node.name: there for there in allotment.rooms}
    for wish in allotment.waiting if placement.deployment == "Any" else ():
        for place in _places(placement, list(left.values())):
            assert pack(place, [Demand(wish.shape.pod, wish.shape.num_pods)]) is None


def _places(placement: Placement, rooms: list[Room]) -> list[list[Room]]:
    if placement.group == "Any":
        return [rooms]
    label = HOSTNAME if placement.group == "SameNode" else RACK
    return [[r for r in rooms if r.node.labels[label] == value] for value in {r.node.labels[label] for r in rooms}]


def why(placement: Placement, wanted: list[Wish], rooms: list[Room], home: str | None = None) -> str:
    return shortage(allot(placement, wanted, home, rooms), home, rooms)


@pytest.mark.parametrize(
    ("placement", "wanted", "rooms", "home", "sentence"),
    [
        (
            GROUP,
            wishes("decode", DEP32, 1),
            [*rack("rack-a", *[4] * 6), *rack("rack-b", *[4] * 7)],
            None,
            "decode needs 32 GPUs (8 pods of 4) in one domain; the freest, rack-b, has 28",
        ),
        (
            GROUP,
            wishes("decode", DEP32, 1),
            rack("rack-a", *[3] * 12),
            None,
            "decode needs 32 GPUs (8 pods of 4) in one domain; the freest, rack-a, has 36, but in pieces: room for 0 "
            "of 8 pods",
        ),
        (
            GROUP,
            wishes("prefill", DEP4, 3),
            rack("rack-a", 4, 2),
            None,
            "2 groups of prefill wait, each needs 4 GPUs in one domain; the freest, rack-a, has 2",
        ),
        (
            ANY,
            wishes("decode", group(2, 4), 1),
            rack("rack-a", 4, 3),
            None,
            "decode needs 8 GPUs (2 pods of 4); the nodes that it may use have 7",
        ),
        (
            NODE,
            wishes("decode", group(2, 2), 1),
            rack("rack-a", 3, 2),
            None,
            "decode needs 4 GPUs (2 pods of 2) on one node; the freest, rack-a-0, has 3",
        ),
        (
            DEPLOYMENT,
            EIGHT_P_ONE_D,
            [*rack("rack-a", *[4] * 15), *rack("rack-b", *[4] * 9)],
            None,
            "the deployment needs 64 GPUs in one domain; the freest, rack-a, has 60",
        ),
        (
            DEPLOYMENT,
            wishes("decode", DEP32, 1),
            [*rack("rack-a", *[4] * 7), *rack("rack-b", *[4] * 9)],
            "rack-a",
            "decode needs 32 GPUs (8 pods of 4) in rack-a, where the deployment is; it has 28",
        ),
        (
            GROUP,
            wishes("decode", group(1, 4, cpus_per_pod=65), 1),
            rack("rack-a", 4, 4),
            None,
            "decode needs 65 CPUs in one domain; the freest, rack-a, has 128, but in pieces: room for 0 of 1 pods",
        ),
        (
            GROUP,
            wishes("decode", group(1, 4), 1),
            [room("n0", gpus(4), tainted=True), room("n1", gpus(4)), room("n2", gpus(4), tainted=True)],
            None,
            "decode needs 4 GPUs; no node will do: of 3, 2 have the taint reserved:NoSchedule, which it does not "
            "tolerate, 1 have no label nvidia.com/gpu.clique",
        ),
        (GROUP, wishes("decode", group(1, 4), 1), [], None, "decode needs 4 GPUs; there are no such nodes"),
    ],
)
def test_a_shortage_is_told_with_numbers(
    placement: Placement, wanted: list[Wish], rooms: list[Room], home: str | None, sentence: str
) -> None:
    assert why(placement, wanted, rooms, home) == sentence
