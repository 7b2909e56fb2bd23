"""The soak's own eyes: a deployment as wished has nothing wrong with it, and each kind of leftover is told."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.operator.soak import Wish, dealt, what_is_wrong
from tests.operator.worlds import CREATED, UID, FakeCluster

from headrace_operator import names
from headrace_operator.api import DisaggDeployment
from headrace_operator.status import as_applied, gate_condition

WISH = Wish("demo")
Objects = dict[tuple[str, str], dict[str, Any]]


def settled() -> tuple[dict[str, Any], Objects]:
    """The resource with its status, and its children, as the operator leaves them."""
    body = WISH.body()
    body["metadata"] |= {"namespace": "default", "uid": UID, "generation": 1}
    cluster = FakeCluster()
    cluster.settle(DisaggDeployment.from_stored(body))
    body["status"] = as_applied(cluster.status)
    for pod in cluster.pods().values():
        if pod["spec"].get("readinessGates"):
            pod["status"]["conditions"].append(gate_condition(True, 0.0))
    return body, cluster.objects


def a_pod(objects: Objects, role: str = "prefill") -> dict[str, Any]:
    return next(body for (kind, name), body in objects.items() if kind == "Pod" and f"-{role}-" in name)


def test_a_deployment_as_wished_has_nothing_wrong_with_it() -> None:
    body, objects = settled()
    assert what_is_wrong(WISH, body, list(objects.values()), 0) == []


def leave_terminating(body: dict[str, Any], objects: Objects) -> None:
    a_pod(objects)["metadata"]["deletionTimestamp"] = CREATED


def close_gate(body: dict[str, Any], objects: Objects) -> None:
    a_pod(objects)["status"]["conditions"][-1]["status"] = "False"


def lose_pod(body: dict[str, Any], objects: Objects) -> None:
    del objects["Pod", a_pod(objects, "decode")["metadata"]["name"]]


def orphan(body: dict[str, Any], objects: Objects) -> None:
    a_pod(objects)["metadata"]["ownerReferences"][0]["uid"] = "of-before"


def keep_old_service(body: dict[str, Any], objects: Objects) -> None:
    name, service = next((k, v) for k, v in objects.items() if k[0] == "Service" and "decode" in k[1])
    objects["Service", f"{name[1]}-old"] = copy.deepcopy(service)


def count_failure(body: dict[str, Any], objects: Objects) -> None:
    body["status"]["rebuilds"] = [{"role": "prefill", "failures": 1}]


def old_image(body: dict[str, Any], objects: Objects) -> None:
    a_pod(objects)["spec"]["containers"][0]["image"] = "none:0"


def unsettled(body: dict[str, Any], objects: Objects) -> None:
    condition = next(c for c in body["status"]["conditions"] if c["type"] == names.PROGRESSING)
    condition["reason"] = names.REASON_CREATING


def unobserved(body: dict[str, Any], objects: Objects) -> None:
    body["metadata"]["generation"] = 2


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (leave_terminating, "is being deleted"),
        (close_gate, "has its gate False"),
        (lose_pod, "decode has groups of [1] pods, not 1 of 2"),
        (orphan, "is owned by of-before"),
        (keep_old_service, "has 2 Services"),
        (count_failure, "1 failures are counted, 0 pods were made to fail"),
        (old_image, "has the image none:0"),
        (unsettled, f"{names.PROGRESSING} says {names.REASON_CREATING}"),
        (unobserved, f"{names.READY} is of generation 1"),
    ],
)
def test_a_leftover_is_told(spoil: Callable[[dict[str, Any], Objects], None], told: str) -> None:
    body, objects = settled()
    spoil(body, objects)
    assert any(told in problem for problem in what_is_wrong(WISH, body, list(objects.values()), 0))


def test_every_kind_of_operation_happens_in_a_run_and_a_seed_repeats_it() -> None:
    weights = {"common": 100, "rare": 1, "rarer": 1}
    hand = dealt(weights, 50, random.Random(7))
    assert len(hand) == 50
    assert set(hand) == set(weights)
    assert hand == dealt(weights, 50, random.Random(7))
    assert len(dealt(weights, 2, random.Random(7))) == 2
