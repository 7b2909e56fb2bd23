"""Builders of API objects for tests: deployments and their children as the API server would return them."""

from __future__ import annotations

import copy
from typing import Any

from tests.operator.rule_cases import resource

from headrace_operator import names
from headrace_operator.admission import Capacity
from headrace_operator.api import DisaggDeployment
from headrace_operator.api_status import Status
from headrace_operator.decide import Decision, Defaults, decide
from headrace_operator.observe import observe
from headrace_operator.status import as_applied, status_of

UID = "11111111-1111-1111-1111-111111111111"
DEFAULTS = Defaults("engine:1", "router:1")
CREATED = "2026-01-01T00:00:00Z"


def stored(changes: dict[str, Any] | None = None, generation: int = 1) -> DisaggDeployment:
    """A deployment as parsed from the API server."""
    body = resource(changes)
    body["metadata"] |= {"namespace": "default", "uid": UID, "generation": generation}
    return DisaggDeployment.from_stored(body)


class FakeCluster:
    """Children of one deployment: applies decisions, lets tests age and break the pods."""

    def __init__(self, uid_prefix: str = "uid") -> None:
        self.uid_prefix = uid_prefix
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.status = Status()
        self.version = 0

    def decide(
        self, deployment: DisaggDeployment, now: float = 0.0, problems: dict[str, str] | None = None
    ) -> Decision:
        observed = observe(deployment.metadata.name, UID, self.objects.values())
        return decide(deployment, observed, self.status, DEFAULTS, now, None, problems)

    def run(
        self,
        deployment: DisaggDeployment,
        now: float = 0.0,
        refusals: tuple[str, ...] = (),
        capacity: Capacity | None = None,
        problems: dict[str, str] | None = None,
    ) -> Decision:
        """One pass; deletions are done at once. The status is kept as the API server would return it."""
        observed = observe(deployment.metadata.name, UID, self.objects.values())
        decision = decide(deployment, observed, self.status, DEFAULTS, now, capacity, problems)
        status = status_of(decision.deployment, observed, decision, self.status, refusals, now)
        self.status = Status.model_validate(as_applied(status))
        for application in decision.apply:
            self.store(application.body)
        for deletion in decision.delete_pods:
            del self.objects["Pod", deletion.pod_name]
        for child in decision.delete_children:
            del self.objects[child.kind, child.name]
        return decision

    def store(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        key = (body["kind"], body["metadata"]["name"])
        before = self.objects.get(key, {})
        if before and not body.keys() - {"apiVersion", "kind", "metadata", "revision"}:
            for part in ("labels", "annotations"):
                before["metadata"].setdefault(part, {}).update(body["metadata"].get(part, {}))
            before |= {"revision": body["revision"]} if "revision" in body else {}
            before["metadata"]["resourceVersion"] = str(self.version)
            return before
        stored_body = {**copy.deepcopy(body), **({"status": before["status"]} if "status" in before else {})}
        uid = before["metadata"]["uid"] if before else f"{self.uid_prefix}-{self.version}"
        stored_body["metadata"] |= {"uid": uid, "resourceVersion": str(self.version), "generation": 1}
        self.objects[key] = stored_body
        return stored_body

    def pods(self) -> dict[str, dict[str, Any]]:
        return {name: body for (kind, name), body in self.objects.items() if kind == "Pod"}

    def make_all_ready(self) -> None:
        """Every pod runs and is ready, and the router too."""
        for body in self.pods().values():
            body["status"] = ready_status()
        self.make_router_ready()

    def make_router_ready(self) -> None:
        for (kind, _), body in self.objects.items():
            if kind == "Deployment":
                replicas = body["spec"]["replicas"]
                body["status"] = {
                    "observedGeneration": 1,
                    "availableReplicas": replicas,
                    "updatedReplicas": replicas,
                }

    def settle(self, deployment: DisaggDeployment, now: float = 0.0, max_passes: int = 50) -> None:
        """Passes until nothing is left to do, all pods becoming ready in between."""
        for _ in range(max_passes):
            decision = self.run(deployment, now)
            if not (decision.apply or decision.delete_pods or decision.delete_children):
                return
            self.make_all_ready()
        raise AssertionError("not settled")


def ready_status() -> dict[str, Any]:
    return {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}


def pod_status(phase: str = "Running", **container: Any) -> dict[str, Any]:
    """Status of a pod that is not ready; `container`: fields of its container's status."""
    return {
        "phase": phase,
        "conditions": [{"type": "Ready", "status": "False"}],
        "containerStatuses": [{"name": names.CONTAINER_ENGINE, **container}],
    }
