"""Counting and packing, against a reference that tries everything."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.racks import GPU, gpus, room

from headrace_operator.capacity import Demand, GroupShape, Room, domains, fill, num_groups, num_pods, pack, taken
from headrace_operator.scheduling import PodShape, Toleration


def brute_force(rooms: Sequence[Room], shapes: Sequence[PodShape]) -> bool:
    """Whether every pod has a place: tries every node for every pod."""
    if not shapes:
        return True
    shape, *others = shapes
    return any(
        brute_force([*rooms[:i], room.without(shape, 1), *rooms[i + 1 :]], others)
        for i, room in enumerate(rooms)
        if shape.objection(room.node) is None and all(room.free.get(name, 0) >= n for name, n in shape.requests)
    )


amounts = st.integers(0, 5).map(lambda n: n * 1000)
nodes = st.lists(
    st.builds(
        lambda i, gpu, cpu, pods, is_tainted: room(f"n{i}", {GPU: gpu, "cpu": cpu, "pods": pods}, tainted=is_tainted),
        st.integers(0, 9),
        st.integers(-1, 5).map(lambda n: n * 1000),
        amounts,
        amounts,
        st.booleans(),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda room: room.node.name,
)
shapes = st.builds(
    lambda gpu, cpu, tolerates: PodShape(
        tuple((name, n * 1000) for name, n in (("cpu", cpu), (GPU, gpu), ("pods", 1)) if n),
        tolerations=(Toleration("", "Exists", "", ""),) if tolerates else (),
    ),
    st.integers(0, 3),
    st.integers(0, 3),
    st.booleans(),
)


def check_no_node_is_overcommitted(rooms: Sequence[Room], demands: Sequence[Demand], packing: list) -> None:
    for demand, counts in zip(demands, packing, strict=True):
        assert sum(counts) == demand.count
        for i, count in enumerate(counts):
            assert count == 0 or demand.shape.objection(rooms[i].node) is None
    for i, there in enumerate(rooms):
        loaded = [d for d, counts in zip(demands, packing, strict=True) if counts[i]]
        for name in {name for demand in loaded for name, _ in demand.shape.requests}:
            asked = sum(
                dict(d.shape.requests).get(name, 0) * counts[i] for d, counts in zip(demands, packing, strict=True)
            )
            assert asked <= there.free.get(name, 0)


@settings(max_examples=80, deadline=None)
@given(nodes, st.lists(st.tuples(shapes, st.integers(1, 3)), min_size=1, max_size=3))
def test_a_packing_is_found_exactly_when_there_is_one(rooms: list[Room], wanted: list[tuple[PodShape, int]]) -> None:
    demands = [Demand(shape, count) for shape, count in wanted]
    packing = pack(rooms, demands)
    pods = [shape for shape, count in wanted for _ in range(count)]
    assert (packing is not None) == brute_force(rooms, pods)
    if packing is not None:
        check_no_node_is_overcommitted(rooms, demands, packing)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(shapes, st.integers(20, 40)), min_size=2, max_size=4), st.integers(0, 99))
def test_a_packing_too_large_to_be_searched_is_still_sound(wanted: list[tuple[PodShape, int]], spare: int) -> None:
    rooms = [room(f"n{i}", {GPU: 8000 + spare, "cpu": 8000, "pods": 30000}, tainted=i % 2 == 0) for i in range(12)]
    demands = [Demand(shape, count) for shape, count in wanted]
    packing = pack(rooms, demands)
    if packing is not None:
        check_no_node_is_overcommitted(rooms, demands, packing)


@settings(max_examples=80, deadline=None)
@given(nodes, shapes, st.integers(1, 3))
def test_whole_groups_are_counted_exactly(rooms: list[Room], shape: PodShape, size: int) -> None:
    count = num_groups(rooms, GroupShape(shape, size))
    assert brute_force(rooms, [shape] * count * size)
    assert count * size > 8 or not brute_force(rooms, [shape] * (count + 1) * size)


def test_a_packing_that_filling_in_turn_misses_is_searched_for() -> None:
    rooms = [room("n0", {GPU: 4000, "cpu": 6000}), room("n1", {GPU: 3000, "cpu": 1000})]
    # The first would go to the larger node, and leave no place for the second.
    lean, even = PodShape((("cpu", 1000), (GPU, 3000))), PodShape((("cpu", 2000), (GPU, 2000)))
    assert pack(rooms, [Demand(lean, 1), Demand(even, 1)]) == [(0, 1), (1, 0)]


def test_pods_fill_the_tightest_nodes_first() -> None:
    rooms = [room("n0", gpus(4)), room("n1", gpus(2)), room("n2", gpus(3))]
    counts = fill(rooms, PodShape(((GPU, 1000),)), 4)
    assert counts == (0, 2, 2)
    assert [r.free[GPU] for r in taken(rooms, PodShape(((GPU, 1000),)), counts)] == [4000, 0, 1000]


def test_what_does_not_fit_has_no_place() -> None:
    assert fill([room("n0", gpus(4))], PodShape(((GPU, 1000),)), 9) == (4,)


@pytest.mark.parametrize("free", [{GPU: 4000}, {"pods": 4000}, {GPU: -1000, "pods": 4000}, {GPU: 999, "pods": 4000}])
def test_a_resource_that_is_missing_or_overdrawn_takes_no_pod(free: dict[str, int]) -> None:
    assert num_pods(room("n0", free), PodShape(((GPU, 1000), ("pods", 1000)))) == 0


def test_domains_are_values_of_a_label_in_order() -> None:
    rooms = [room("n0", {}, rack="b"), room("n1", {}), room("n2", {}, rack="a"), room("n3", {}, rack="b")]
    found = domains(rooms, "rack")
    assert {value: [r.node.name for r in members] for value, members in found.items()} == {
        "a": ["n2"],
        "b": ["n0", "n3"],
    }
    assert list(found) == ["a", "b"]
