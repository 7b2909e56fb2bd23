"""What the operator renders for resources, as the programs in the pods get it: argument lists, containers, objects."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from headrace_operator import names
from headrace_operator.api import DisaggDeployment
from headrace_operator.decide import Defaults
from headrace_operator.preview import preview

ROOT = Path(__file__).parents[2]
DEFAULTS = Defaults("engine:1", "router:1")

# Every field that reaches a command line has a value that is not its default.
FULL: dict[str, Any] = {
    "apiVersion": names.API_VERSION,
    "kind": names.KIND,
    "metadata": {"name": "full", "namespace": "serving"},
    "spec": {
        "model": {"name": "org/v4", "source": {"pvc": {"claimName": "weights", "path": "v4/flash"}}},
        "engine": {
            "maxModelLen": 5000,
            "blockSize": 384,
            "dtype": "bfloat16",
            "cacheDtype": "float32",
            "fakeQuantization": "cache",
            "maxBatchTokens": 777,
            "maxSequences": 9,
            "numBlocks": 55,
            "threads": 3,
            "extraArgs": ["--max-waiting", "17", "--request-timeout-seconds=99"],
        },
        "transfer": {"leaseSeconds": 41},
        "router": {"replicas": 2},
        "roles": [
            {"name": "prefill", "replicas": 2, "parallelism": {"data": 2}},
            {"name": "decode", "parallelism": {"data": 6, "dataLocal": 2, "expert": True}},
        ],
        "drainTimeoutSeconds": 13,
    },
}


@dataclass(frozen=True)
class EnginePod:
    """One rendered engine pod of `deployment`."""

    deployment: DisaggDeployment
    role: str
    index: int  # within its group
    body: dict[str, Any]

    @property
    def container(self) -> dict[str, Any]:
        return container(self.body["spec"], names.CONTAINER_ENGINE)

    @property
    def argv(self) -> list[str]:
        return [*self.container["command"], *self.container["args"]]

    def __str__(self) -> str:
        return f"{self.deployment.metadata.name}-{self.role}-{self.index}"


def container(pod_spec: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(item for item in pod_spec["containers"] if item["name"] == name)
    return found


def deployments() -> list[DisaggDeployment]:
    """Every example, and one with every field set."""
    examples = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "docs/examples").glob("*.yaml"))]
    return [DisaggDeployment.from_manifest(body) for body in [*examples, FULL]]


def objects(deployment: DisaggDeployment, kind: str) -> list[dict[str, Any]]:
    return [body for body in preview(deployment, DEFAULTS) if body["kind"] == kind]


def engine_pods() -> list[EnginePod]:
    """All engine pods of `deployments()`."""
    return [
        EnginePod(deployment, body["metadata"]["labels"][names.LABEL_ROLE], _index(body), body)
        for deployment in deployments()
        for body in objects(deployment, "Pod")
    ]


def router_pod_spec(deployment: DisaggDeployment) -> dict[str, Any]:
    (body,) = objects(deployment, "Deployment")
    spec: dict[str, Any] = body["spec"]["template"]["spec"]
    return spec


def router_argv(deployment: DisaggDeployment) -> list[str]:
    found = container(router_pod_spec(deployment), names.CONTAINER_ROUTER)
    return [*found["command"], *found["args"]]


def _index(pod: dict[str, Any]) -> int:
    return int(pod["metadata"]["labels"][names.LABEL_POD_INDEX])
