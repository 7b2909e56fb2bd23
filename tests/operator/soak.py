"""What a deployment should look like once all is quiet, and what is wrong with it. Pure: dicts in, sentences out.

Written against the API that users see, not with the operator's planner: a soak would not notice a mistake that both
share.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.operator.rule_cases import resource

from headrace_operator import names

Body = Mapping[str, Any]

ON_RACKS = {
    "nodeSelector": {"headrace.dev/node-kind": "kwok"},
    "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}],
}
NODE_LOSS_SECONDS = 5
_GROUP_LABELS = (names.LABEL_ROLE, names.LABEL_REVISION, names.LABEL_GROUP)


def dealt(weights: Mapping[str, int], count: int, chance: random.Random) -> list[str]:
    """`count` kinds of operations in random order: each once, as far as that goes, and the rest drawn by weight."""
    kinds = list(weights)
    hand = [*kinds, *chance.choices(kinds, list(weights.values()), k=max(0, count - len(kinds)))]
    chance.shuffle(hand)
    return hand[:count]


@dataclass(frozen=True)
class Wish:
    """A deployment as a test asks for it; every pod has one GPU."""

    name: str
    replicas: tuple[int, int] = (2, 1)  # groups of prefill and decode
    decode_pods: int = 2  # of a group; a prefill group is one pod
    image: int = 1
    is_placed: bool = False  # each group within one rack

    @property
    def image_name(self) -> str:
        return f"none:{self.image}"

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """(groups, pods of each) by role."""
        return {names.PREFILL: (self.replicas[0], 1), names.DECODE: (self.replicas[1], self.decode_pods)}

    def body(self) -> dict[str, Any]:
        return resource(
            {
                "metadata.name": self.name,
                "spec.engine": {"image": self.image_name},
                "spec.router": {"replicas": 0},
                "spec.drainTimeoutSeconds": 1,
                "spec.rolloutStrategy": {"maxSurge": 1, "maxUnavailable": 1},
                "spec.restartPolicy": {
                    "maxRestarts": 50,
                    "nodeLossSeconds": NODE_LOSS_SECONDS,
                    "backoffSeconds": {"base": 1, "max": 4},
                },
                "spec.roles.0.replicas": self.replicas[0],
                "spec.roles.0.resources": {"gpu": 1},
                "spec.roles.0.template": ON_RACKS,
                "spec.roles.1.replicas": self.replicas[1],
                "spec.roles.1.parallelism": {"data": self.decode_pods, "dataLocal": 1, "expert": True},
                "spec.roles.1.resources": {"gpu": 1},
                "spec.roles.1.template": ON_RACKS,
                **({"spec.placement": {"group": "SameDomain"}} if self.is_placed else {}),
            }
        )


def what_is_wrong(wish: Wish, deployment: Body | None, children: Sequence[Body], num_failures: int) -> list[str]:
    """Everything in which the cluster differs from the wish; nothing: it is as wished.

    `children`: all objects with the labels of a deployment of that name; `num_failures`: of its pods, how
    many were made to fail or were taken away."""
    if deployment is None:
        return [f"{wish.name} does not exist"]
    uid = deployment["metadata"]["uid"]
    pods = [body for body in children if body["kind"] == "Pod"]
    found = [
        *_of_status(deployment, num_failures),
        *(f"{_name(body)} is owned by {_owner(body)}, not {uid}" for body in children if _owner(body) != uid),
        *(f"{_name(body)} is being deleted" for body in children if "deletionTimestamp" in body["metadata"]),
        *(problem for pod in pods for problem in _of_pod(pod, wish)),
        *_of_groups(pods, wish),
        *_of_objects(children, wish),
    ]
    return [f"{wish.name}: {problem}" for problem in found]


def _name(body: Body) -> str:
    return f"{body['kind']} {body['metadata']['name']}"


def _owner(body: Body) -> str | None:
    references = body["metadata"].get("ownerReferences") or ()
    return next((str(r["uid"]) for r in references if r.get("controller")), None)


def _of_status(deployment: Body, num_failures: int) -> Iterator[str]:
    status = deployment.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    for kind in (names.READY, names.VALID):
        condition = conditions.get(kind, {"status": "Unknown", "reason": "", "message": "", "observedGeneration": 0})
        if condition["status"] != "True":
            yield f"{kind} is {condition['status']}: {condition['reason']}: {condition['message']}"
        if condition["observedGeneration"] != deployment["metadata"]["generation"]:
            yield f"{kind} is of generation {condition['observedGeneration']}"
    progressing = conditions.get(names.PROGRESSING, {"reason": "Unknown", "message": ""})
    if progressing["reason"] != names.REASON_SETTLED:
        yield f"{names.PROGRESSING} says {progressing['reason']}: {progressing['message']}"
    if status.get("leaving"):
        yield f"groups are noted as leaving: {status['leaving']}"
    failures = sum(rebuild["failures"] for rebuild in status.get("rebuilds") or ())
    if failures > num_failures:
        yield f"{failures} failures are counted, {num_failures} pods were made to fail: {status['rebuilds']}"


def _of_pod(pod: Body, wish: Wish) -> Iterator[str]:
    image = pod["spec"]["containers"][0]["image"]
    if image != wish.image_name:
        yield f"{_name(pod)} has the image {image}, not {wish.image_name}"
    conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions") or ()}
    if conditions.get("Ready") != "True":
        yield f"{_name(pod)} is not ready: {pod['status'].get('phase')}"
    has_gate = any(g["conditionType"] == names.GATE_SERVING for g in pod["spec"].get("readinessGates") or ())
    if has_gate != (pod["metadata"]["labels"].get(names.LABEL_POD_INDEX) == "0"):
        yield f"{_name(pod)} has {'a' if has_gate else 'no'} readiness gate"
    if has_gate and conditions.get(names.GATE_SERVING) != "True":
        yield f"{_name(pod)} has its gate {conditions.get(names.GATE_SERVING)}"


def _of_groups(pods: Sequence[Body], wish: Wish) -> Iterator[str]:
    groups = Counter(tuple(pod["metadata"]["labels"].get(label, "?") for label in _GROUP_LABELS) for pod in pods)
    for role, (num_groups, num_pods) in wish.sizes.items():
        sizes = [count for (of, _, _), count in groups.items() if of == role]
        if sizes != [num_pods] * num_groups:
            yield f"{role} has groups of {sizes} pods, not {num_groups} of {num_pods}"
    if len({(role, revision) for role, revision, _ in groups}) > sum(num > 0 for num, _ in wish.sizes.values()):
        yield f"there are groups of several revisions: {sorted(groups)}"


def _of_objects(children: Sequence[Body], wish: Wish) -> Iterator[str]:
    """Services that are too many, budgets of roles that need none, and more history than is kept."""
    counts = Counter((body["kind"], body["metadata"]["labels"].get(names.LABEL_ROLE, "")) for body in children)
    for role, (num_groups, _) in wish.sizes.items():
        if counts["Service", role] != 1:
            yield f"{role} has {counts['Service', role]} Services, not 1"
        if counts["PodDisruptionBudget", role] != (num_groups > 1):
            yield f"{role} has {counts['PodDisruptionBudget', role]} budgets with {num_groups} groups"
        if not 1 <= counts["ControllerRevision", role] <= 10:
            yield f"{role} has {counts['ControllerRevision', role]} revisions"
