"""Forecasts on the nodes of a cluster: what is told of the room, and that the operator then does the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.rack_worlds import SAME_RACK, Racks, spec
from tests.operator.racks import GPU
from tests.operator.worlds import UID, stored

from headrace_operator import names
from headrace_operator.forecast import Forecast
from headrace_operator.observe import place_of
from headrace_operator.outlook import Scene, counted, outlook
from headrace_operator.status import as_applied

B = {"spec.engine": {"maxSequences": 8}}  # another revision
OTHER_CACHE = {"spec.engine": {"cacheDtype": "bfloat16"}}  # and another KV fingerprint
SURGE = {"spec.rolloutStrategy": {"maxSurge": 1, "maxUnavailable": 0}}
ONE_RACK = {"group": "SameDomain", "deployment": "SameDomain"}


def scene(racks: Racks, name: str = "one", others: list[dict[str, Any]] | None = None) -> Scene:
    """What the API server would show of the racks and of one deployment."""
    pods = [pod for cluster in racks.clusters.values() for pod in cluster.pods().values()]
    children = racks.clusters[name].objects.values() if name in racks.clusters else ()
    status = as_applied(racks.clusters[name].status) if name in racks.clusters else {}
    live = {"kind": names.KIND, "metadata": {"name": name, "namespace": "default", "uid": UID}, "status": status}
    objects = [*children, *pods, *racks.bodies, *(others or ())]
    return Scene("default", live if name in racks.clusters else None, objects, counted(objects))


def pod(name: str, node: str, gpus: int) -> dict[str, Any]:
    """Somebody else's pod."""
    requests = {"requests": {GPU: gpus}}
    metadata = {"name": name, "namespace": "elsewhere", "uid": name}
    return {
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"nodeName": node, "containers": [{"name": "c", "resources": requests}]},
    }


def settled(nodes_per_rack: list[int], changes: dict[str, Any]) -> Racks:
    racks = Racks(nodes_per_rack, seed=1)
    racks.want("one", changes)
    racks.settle()
    return racks


def told(result: Forecast) -> list[str]:
    """One line a step: what is done, and what there is no room for meanwhile."""
    lines = []
    for step in result.steps:
        done = [f"{action.verb} {action.group.role} {action.group.index}" for action in step.actions]
        lines.append(", ".join(done) + (f" | {step.shortage}" if step.shortage else ""))
    return lines


def test_a_first_deployment_on_too_small_a_rack_says_what_it_waits_for() -> None:
    racks = Racks([7, 3], seed=1)
    wanted = stored({"metadata.name": "one", **spec((1, 4), (1, 8, 4), SAME_RACK)})
    result = outlook(wanted, scene(racks), now=0.0)
    sentence = "decode needs 32 GPUs (8 pods of 4) in one domain; the freest, rack-0, has 28"
    assert told(result) == [f"make prefill 0 | {sentence}"]
    assert result.blocked == (f"NoCapacity: {sentence}", "decode group 0 does not become ready")


def test_pods_of_others_take_their_room() -> None:
    racks = Racks([3], seed=1)
    wanted = stored({"metadata.name": "one", **spec((1, 4), (1, 2, 4), SAME_RACK)})
    assert outlook(wanted, scene(racks), now=0.0).blocked == ()
    result = outlook(wanted, scene(racks, others=[pod("x", "rack-0-0", gpus=1)]), now=0.0)
    assert result.blocked[0] == "NoCapacity: prefill needs 4 GPUs in one domain; the freest, rack-0, has 3"


FULL = spec((1, 4), (2, 1, 4), SAME_RACK)  # three nodes
RECREATE = {"spec.rolloutStrategy": {**SURGE["spec.rolloutStrategy"], "whenFull": "Recreate"}}
NONE_LEFT = "decode needs 4 GPUs in one domain; the freest, rack-0, has 0"
IN_TURN = ["remove prefill 0, remove decode 1", "make prefill 0, make decode 1", "remove decode 0", "make decode 0"]


def with_shortage(steps: list[str], *shortages: str) -> list[str]:
    return [f"{step} | {text}" if text else step for step, text in zip(steps, shortages, strict=True)]


@pytest.mark.parametrize(
    ("strategy", "steps", "blocked"),
    [
        pytest.param({}, IN_TURN, "", id="in its place a group lacks no room"),
        pytest.param(SURGE, [], "there is no room for decode group 1 of revision", id="Wait says what is missing"),
        pytest.param(
            RECREATE,
            with_shortage(IN_TURN, f"{NONE_LEFT.replace('decode', 'prefill')}; {NONE_LEFT}", "", NONE_LEFT, ""),
            "",
            id="Recreate says why there is a gap",
        ),
    ],
)
def test_a_rollout_on_a_full_rack(strategy: dict[str, Any], steps: list[str], blocked: str) -> None:
    racks = settled([3], FULL)
    result = outlook(stored({"metadata.name": "one", **FULL, **B, **strategy}), scene(racks), now=0.0)
    assert told(result) == steps
    assert any(blocked in reason for reason in result.blocked) == bool(blocked)


def test_a_number_of_free_gpus_goes_before_what_the_nodes_have() -> None:
    racks = settled([3], FULL)
    wanted = stored({"metadata.name": "one", **FULL, **B, **SURGE})
    result = outlook(wanted, scene(racks), now=0.0, num_free=4)
    assert result.blocked == ()
    assert max(step.num_in_use for step in result.steps) == 16


def test_8p1d_becomes_4p2d_in_the_gpus_of_one_rack() -> None:
    racks = settled([16], spec((8, 4), (1, 8, 4), SAME_RACK))
    wanted = stored({"metadata.name": "one", **spec((4, 4), (2, 4, 4), SAME_RACK)})
    result = outlook(wanted, scene(racks), now=0.0)
    assert result.blocked == ()
    assert max(step.num_in_use for step in result.steps) == 64


def test_without_a_placement_pods_are_made_that_find_no_node() -> None:
    racks = settled([3], FULL)
    no_placement = {key: value for key, value in FULL.items() if key != "spec.placement"}
    result = outlook(stored({"metadata.name": "one", **no_placement, **B, **SURGE}), scene(racks), now=0.0)
    missing = "prefill needs 4 GPUs; the nodes that it may use have 0"
    assert told(result) == [f"make prefill 0, make decode 1 | {missing}"]
    assert result.blocked[0] == f"NoCapacity: {missing}"


def test_pods_that_wait_for_a_node_find_one_if_there_is_one() -> None:
    racks = Racks([3], seed=1)
    no_placement = {key: value for key, value in FULL.items() if key != "spec.placement"}
    racks.want("one", no_placement)
    racks.clusters["one"].run(racks.wanted["one"])  # made, and not seen by the scheduler yet
    wanted = stored({"metadata.name": "one", **no_placement})
    assert outlook(wanted, scene(racks), now=0.0) == Forecast((), (), "GPUs")
    crowded = outlook(wanted, scene(racks, others=[pod("x", "rack-0-0", gpus=1)]), now=0.0)
    assert crowded.blocked == (
        "NoCapacity: decode needs 4 GPUs; the nodes that it may use have 3",
        "decode group 1 does not become ready",
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "Node", "metadata": {"name": "n"}, "status": {"allocatable": {GPU: "many"}}}, "Node n is not as"),
        ({"kind": "Pod", "metadata": {"name": "p"}}, "Pod p is not as the API server has it: KeyError('namespace')"),
        ({"kind": "Node", "metadata": {}}, "Node without a name is not as the API server has it"),
    ],
)
def test_nodes_and_pods_that_cannot_be_read_are_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="is not as the API server has it") as refused:
        counted([*Racks([1], seed=1).bodies, wrong])
    assert message in str(refused.value)


placements = st.sampled_from([SAME_RACK, ONE_RACK, {"group": "Any"}])
strategies = st.fixed_dictionaries(
    {
        "maxSurge": st.integers(0, 1),
        "maxUnavailable": st.integers(0, 1),
        "whenFull": st.sampled_from(["Wait", "Recreate"]),
        "partition": st.integers(0, 1),
    }
).filter(lambda strategy: strategy["maxSurge"] + strategy["maxUnavailable"] > 0)


def groups_of(racks: Racks) -> set[Any]:
    places = [place_of(body) for body in racks.clusters["one"].pods().values()]
    return {place[0] for place in places if place}


@settings(max_examples=25, deadline=None)
@given(
    nodes_per_rack=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    before=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    after=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    pods_per_group=st.integers(1, 2),
    placement=placements,
    strategy=strategies,
    change=st.sampled_from([{}, B, OTHER_CACHE]),
    seed=st.integers(0, 99),
)
def test_the_operator_ends_where_the_forecast_ends(
    nodes_per_rack: list[int],
    before: tuple[int, int],
    after: tuple[int, int],
    pods_per_group: int,
    placement: dict[str, Any],
    strategy: dict[str, Any],
    change: dict[str, Any],
    seed: int,
) -> None:
    """Each pod fills a node, so that it is all the same to which of several the scheduler binds it."""
    racks = Racks(nodes_per_rack, seed)
    racks.want("one", spec((before[0], 4), (before[1], pods_per_group, 4), placement))
    racks.settle()
    wanted = {
        **spec((after[0], 4), (after[1], pods_per_group, 4), placement),
        **change,
        "spec.rolloutStrategy": strategy,
    }
    result = outlook(stored({"metadata.name": "one", **wanted}), scene(racks), now=0.0)
    groups = groups_of(racks)
    for action in (action for step in result.steps for action in step.actions):
        groups ^= {action.group}
    racks.want("one", wanted)
    racks.settle()
    assert groups_of(racks) == groups
    assert (racks.reason("one") == names.REASON_SETTLED) == (result.blocked == ())
