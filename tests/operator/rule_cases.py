"""Accept and reject cases of every cross-field rule: one table for Python, CEL and the real API server.

`resource(changes)` starts from a minimal valid resource; a change's key is a dotted path, its value what is put there.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

MINIMAL: dict[str, Any] = {
    "apiVersion": "headrace.dev/v1alpha1",
    "kind": "DisaggDeployment",
    "metadata": {"name": "demo"},
    "spec": {
        "model": {"name": "tiny", "source": {"tiny": {"family": "v4"}}},
        "roles": [{"name": "prefill"}, {"name": "decode"}],
    },
}


def resource(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    body = copy.deepcopy(MINIMAL)
    for path, value in (changes or {}).items():
        node: Any = body
        *parents, last = path.split(".")
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        if isinstance(node, list):
            node[int(last)] = value
        else:
            node[last] = value
    return body


@dataclass(frozen=True)
class Case:
    """One resource and what becomes of it. `message`: part of the refusal, or None if it is accepted."""

    name: str
    changes: dict[str, Any]
    message: str | None = None
    before: dict[str, Any] | None = field(default=None)  # the resource that is updated, as changes of MINIMAL

    @property
    def body(self) -> dict[str, Any]:
        return resource(self.changes)


LONGEST_NAME = "a" * 38
ROLES = "roles must be prefill and decode together"
SOURCE = "set exactly one of tiny, hostPath, pvc"
GPU = "resources.gpu must equal the ranks of a pod"
DATA_LOCAL = "dataLocal must divide data"
CAPACITY = "numBlocks * blockSize must be at least maxModelLen"
OWN_FLAG = "extraArgs may not repeat a flag"
BACKOFF = "backoffSeconds.base may not be more than backoffSeconds.max"
RATIO = {"min": {"prefill": 1, "decode": 2}, "max": {"prefill": 8, "decode": 1}}
SERVICE_NAME = "may not end like a Service of engines"
PREFERENCE = "enforcement: Preferred needs a preference"
AUTO = {"mode": "Auto", "auto": {"gpuBudget": 2}}
BOTH_OR_NONE = "scaling.auto belongs to scaling.mode Auto"
LEAST = "a gpuBudget that holds minReplicas of both"
BOTH_ZERO = "maxSurge and maxUnavailable cannot both be 0"
COMPUTE_DOMAIN = "computeDomain needs group: SameDomain"
QUEUE = "queue needs gang: Kueue or Volcano"
GPUS = {"name": "gpus", "resourceClaimTemplateName": "four-gpus"}
DECIDED = "podSpec may not set restartPolicy"

CASES = [
    Case("the minimal resource", {}),
    Case("unified alone", {"spec.roles": [{"name": "unified"}]}),
    Case("prefill alone", {"spec.roles": [{"name": "prefill"}]}, ROLES),
    Case("decode alone", {"spec.roles": [{"name": "decode"}]}, ROLES),
    Case("unified beside decode", {"spec.roles": [{"name": "unified"}, {"name": "decode"}]}, ROLES),
    Case("a role scaled to zero", {"spec.roles.0.replicas": 0}),
    Case("one source: a folder", {"spec.model.source": {"hostPath": {"path": "/models/v4"}}}),
    Case("one source: a claim", {"spec.model.source": {"pvc": {"claimName": "weights", "path": "v4/flash"}}}),
    Case("no source", {"spec.model.source": {}}, SOURCE),
    Case(
        "two sources",
        {"spec.model.source": {"tiny": {"family": "v4"}, "hostPath": {"path": "/models/v4"}}},
        SOURCE,
    ),
    Case("two ranks in one pod", {"spec.roles.1.parallelism": {"data": 2}}),
    Case("two ranks in two pods", {"spec.roles.1.parallelism": {"data": 2, "dataLocal": 1, "expert": True}}),
    Case("eight pods of four ranks", {"spec.roles.1.parallelism": {"data": 32, "dataLocal": 4, "expert": True}}),
    Case("three ranks over pods of two", {"spec.roles.1.parallelism": {"data": 3, "dataLocal": 2}}, DATA_LOCAL),
    Case(
        "more ranks in a pod than in the group", {"spec.roles.1.parallelism": {"data": 2, "dataLocal": 4}}, DATA_LOCAL
    ),
    Case("sixty-four ranks in one pod", {"spec.roles.1.parallelism": {"data": 64}}),
    Case("sixty-five ranks in one pod", {"spec.roles.1.parallelism": {"data": 65}}, DATA_LOCAL),
    Case("one GPU for the one rank", {"spec.roles.0.resources": {"gpu": 1}}),
    Case("two GPUs for one rank", {"spec.roles.0.resources": {"gpu": 2}}, GPU),
    Case(
        "a GPU for each rank of a pod",
        {"spec.roles.0.resources": {"gpu": 2}, "spec.roles.0.parallelism": {"data": 4, "dataLocal": 2}},
    ),
    Case(
        "GPUs for the group instead of the pod",
        {"spec.roles.0.resources": {"gpu": 4}, "spec.roles.0.parallelism": {"data": 4, "dataLocal": 2}},
        GPU,
    ),
    Case("GPUs as a limit", {"spec.roles.0.resources": {"limits": {"nvidia.com/gpu": 1}}}),
    Case(
        "GPUs both ways",
        {"spec.roles.0.resources": {"gpu": 1, "limits": {"nvidia.com/gpu": 1}}},
        "set either gpu or limits[nvidia.com/gpu]",
    ),
    Case("a cache that holds one longest sequence", {"spec.engine": {"maxModelLen": 256, "numBlocks": 2}}),
    Case("a cache one token too small", {"spec.engine": {"maxModelLen": 257, "numBlocks": 2}}, CAPACITY),
    Case("a longer context than the default cache", {"spec.engine": {"maxModelLen": 131073}}, CAPACITY),
    Case("another flag of the engine", {"spec.engine": {"extraArgs": ["--some-flag=1", "--roleplay"]}}),
    Case("a flag of the operator", {"spec.engine": {"extraArgs": ["--role=decode"]}}, OWN_FLAG),
    Case("a flag of the operator and its value apart", {"spec.engine": {"extraArgs": ["--port", "1"]}}, OWN_FLAG),
    Case("a value that is spelled like a flag", {"spec.engine": {"extraArgs": ["--some-flag", "port", "role=x"]}}),
    Case("a flag of the operator over two lines", {"spec.engine": {"extraArgs": ["--role=a\nb"]}}, OWN_FLAG),
    Case("a restart policy", {"spec.roles.0.template": {"podSpec": {"restartPolicy": "Always"}}}, DECIDED),
    Case("a name for the pod", {"spec.roles.0.template": {"podSpec": {"hostname": "a"}}}, DECIDED),
    Case("a grace period", {"spec.roles.0.template": {"podSpec": {"terminationGracePeriodSeconds": 1}}}, DECIDED),
    Case("a subdomain of the router", {"spec.router": {"template": {"podSpec": {"subdomain": "a"}}}}, DECIDED),
    Case("secrets to pull the router", {"spec.router": {"template": {"podSpec": {"imagePullSecrets": []}}}}),
    Case("no restarts at all", {"spec.restartPolicy": {"maxRestarts": 0}}),
    Case("the same wait each time", {"spec.restartPolicy": {"backoffSeconds": {"base": 30, "max": 30}}}),
    Case("a first wait over the cap", {"spec.restartPolicy": {"backoffSeconds": {"base": 301}}}, BACKOFF),
    Case("scaled from outside", {"spec.scaling": {"mode": "External"}}),
    Case("scaled from outside in bounds", {"spec.scaling": {"mode": "External", "ratio": RATIO}}),
    Case(
        "bounds of a ratio that meet", {"spec.scaling": {"mode": "External", "ratio": {**RATIO, "max": RATIO["min"]}}}
    ),
    Case(
        "the least ratio over the most",
        {"spec.scaling": {"mode": "External", "ratio": {"min": RATIO["max"], "max": RATIO["min"]}}},
        "scaling.ratio.min may not be over scaling.ratio.max",
    ),
    Case("a ratio of what the spec says", {"spec.scaling": {"ratio": RATIO}}, "scaling.ratio needs scaling.mode"),
    Case(
        "a ratio of one role",
        {"spec.roles": [{"name": "unified"}], "spec.scaling": {"mode": "External", "ratio": RATIO}},
        "scaling.ratio needs the roles prefill and decode",
    ),
    Case("scaled by the operator", {"spec.scaling": AUTO}),
    Case("scaled by the operator, which says no more of it", {"spec.scaling": {"mode": "Auto"}}, BOTH_OR_NONE),
    Case("what Auto is to do, in another mode", {"spec.scaling": {"auto": {"gpuBudget": 2}}}, BOTH_OR_NONE),
    Case("a ratio for Auto", {"spec.scaling": {**AUTO, "ratio": RATIO}}, "scaling.ratio needs scaling.mode"),
    Case("Auto for one role", {"spec.roles": [{"name": "unified"}], "spec.scaling": AUTO}, LEAST),
    Case(
        "a budget that holds the least of both",
        {
            "spec.scaling": {"mode": "Auto", "auto": {"gpuBudget": 36, "prefill": {"minReplicas": 4}}},
            "spec.roles.1.parallelism": {"data": 32, "dataLocal": 4, "expert": True},
        },
    ),
    Case(
        "a budget one GPU too small",
        {
            "spec.scaling": {"mode": "Auto", "auto": {"gpuBudget": 35, "prefill": {"minReplicas": 4}}},
            "spec.roles.1.parallelism": {"data": 32, "dataLocal": 4, "expert": True},
        },
        LEAST,
    ),
    Case(
        "as many groups at the least as at the most",
        {"spec.scaling": {"mode": "Auto", "auto": {"gpuBudget": 9, "decode": {"minReplicas": 2, "maxReplicas": 2}}}},
    ),
    Case(
        "more groups at the least than at the most",
        {"spec.scaling": {"mode": "Auto", "auto": {"gpuBudget": 9, "decode": {"minReplicas": 3, "maxReplicas": 2}}}},
        "minReplicas may not be over maxReplicas",
    ),
    Case("surge instead of a gap", {"spec.rolloutStrategy": {"maxSurge": 1, "maxUnavailable": 0}}),
    Case("no gap and no surge", {"spec.rolloutStrategy": {"maxUnavailable": 0}}, BOTH_ZERO),
    Case("a quarter more, a quarter away", {"spec.rolloutStrategy": {"maxSurge": "25%", "maxUnavailable": "25%"}}),
    Case("a share of surge and no gap", {"spec.rolloutStrategy": {"maxSurge": "1%", "maxUnavailable": 0}}),
    Case("a number beside a share", {"spec.rolloutStrategy": {"maxSurge": 0, "maxUnavailable": "100%"}}),
    Case("no share of either", {"spec.rolloutStrategy": {"maxSurge": "0%", "maxUnavailable": "0%"}}, BOTH_ZERO),
    Case("no share and none", {"spec.rolloutStrategy": {"maxSurge": 0, "maxUnavailable": "0%"}}, BOTH_ZERO),
    Case("the longest name", {"metadata.name": LONGEST_NAME}),
    Case("a name one too long", {"metadata.name": LONGEST_NAME + "a"}, "38 characters"),
    Case("a name that no Service can have", {"metadata.name": "1st"}, "start with a letter"),
    Case("a name like a role's Service", {"metadata.name": "chat-decode-leaders"}, SERVICE_NAME),
    Case("a name like a revision's", {"metadata.name": "chat-prefill-0123abcd"}),
    Case("a name that ends with a role", {"metadata.name": "chat-decode"}),
    Case("a name that ends with a role and a number", {"metadata.name": "chat-decode-2"}),
    Case("a role's name alone", {"metadata.name": "decode"}),
    Case("a dotted name", {"metadata.name": "a.b"}, "start with a letter"),
    Case("room is looked for, anywhere", {"spec.placement": {}}),
    Case("groups in one rack", {"spec.placement": {"group": "SameDomain"}}),
    Case(
        "groups in one rack if possible",
        {"spec.placement": {"group": "SameDomain", "deployment": "SameDomain", "enforcement": "Preferred"}},
    ),
    Case("a preference for nothing", {"spec.placement": {"enforcement": "Preferred"}}, PREFERENCE),
    Case("memory shared over NVLink", {"spec.placement": {"group": "SameDomain", "computeDomain": True}}),
    Case("memory shared beyond one rack", {"spec.placement": {"computeDomain": True}}, COMPUTE_DOMAIN),
    Case("memory shared on one node", {"spec.placement": {"group": "SameNode", "computeDomain": True}}, COMPUTE_DOMAIN),
    Case("no shared memory, anywhere", {"spec.placement": {"computeDomain": False}}),
    Case("the scheduler's own gangs", {"spec.placement": {"gang": "Native"}}),
    Case("Volcano and its own queue", {"spec.placement": {"gang": "Volcano"}}),
    Case("Volcano and a queue", {"spec.placement": {"gang": "Volcano", "queue": "team-a"}}),
    Case("Kueue and a queue", {"spec.placement": {"gang": "Kueue", "queue": "team-a"}}),
    Case("Kueue without a queue", {"spec.placement": {"gang": "Kueue"}}, "gang: Kueue needs queue"),
    Case("a queue of nobody", {"spec.placement": {"queue": "team-a"}}, QUEUE),
    Case("a queue of the scheduler", {"spec.placement": {"gang": "Native", "queue": "team-a"}}, QUEUE),
    Case("GPUs of a driver", {"spec.roles.0.resources": {"claims": [GPUS]}}),
    Case(
        "a claim of the operator's own name",
        {"spec.roles.0.resources": {"claims": [{**GPUS, "name": "compute-domain"}]}},
        "claims may not be named compute-domain",
    ),
    Case("a new placement", {"spec.placement": {"group": "SameNode"}}, before={"spec.placement": {}}),
    Case("a new number of groups", {"spec.roles.0.replicas": 3}, before={}),
    Case("a new seed", {"spec.model.source.tiny.seed": 7}, before={}),
    Case("another model name", {"spec.model.name": "other"}, "model.name cannot be changed", before={}),
]

# Bounds and types of single fields: the schema's part, checked in the same three ways.
FIELD_CASES = [
    Case("racks by another label", {"spec.placement": {"domainLabel": "ds.example.com/nvlink.domain"}}),
    Case("a label that no node can have", {"spec.placement": {"domainLabel": "no such label"}}, "domainLabel"),
    Case("no such gang", {"spec.placement": {"gang": "Coscheduling"}}, "gang"),
    Case("a queue that nobody can name", {"spec.placement": {"gang": "Kueue", "queue": "Team A"}}, "queue"),
    Case("no such scope", {"spec.placement": {"group": "SameRack"}}, "group"),
    Case("a negative number of groups", {"spec.roles.0.replicas": -1}, "replicas"),
    Case("fewer than no restarts", {"spec.restartPolicy": {"maxRestarts": -1}}, "maxRestarts"),
    Case("no wait at all", {"spec.restartPolicy": {"backoffSeconds": {"base": 0}}}, "base"),
    Case("too many groups", {"spec.roles.0.replicas": 1001}, "replicas"),
    Case("no such role", {"spec.roles.0.name": "encode"}, "name"),
    Case("no such type", {"spec.engine": {"dtype": "float8"}}, "dtype"),
    Case("a ratio with nothing in it", {"spec.scaling": {"mode": "External", "ratio": {"min": {"decode": 1}}}}, "min"),
    Case("a ratio of no groups", {"spec.scaling.ratio": {"max": {"prefill": 0, "decode": 1}}}, "prefill"),
    Case("no such mode of scaling", {"spec.scaling": {"mode": "Manual"}}, "mode"),
    Case("Auto without a budget", {"spec.scaling": {"mode": "Auto", "auto": {}}}, "gpuBudget"),
    Case(
        "a dry run with all targets",
        {
            "spec.scaling": {
                "mode": "Auto",
                "auto": {
                    "gpuBudget": 2,
                    "dryRun": True,
                    "targets": {
                        "firstTokenMilliseconds": 500,
                        "interTokenMilliseconds": 20,
                        "kvUsePercent": 80,
                        "requestsPerRank": 48,
                    },
                },
            }
        },
    ),
    Case(
        "a target of no time",
        {"spec.scaling": {**AUTO, "auto": {"gpuBudget": 2, "targets": {"interTokenMilliseconds": 0}}}},
        "interTokenMilliseconds",
    ),
    Case(
        "a cool-down that shows nothing",
        {"spec.scaling": {**AUTO, "auto": {"gpuBudget": 2, "cooldownSeconds": 29}}},
        "cooldownSeconds",
    ),
    Case("no roles", {"spec.roles": []}, "roles"),
    Case("the same role twice", {"spec.roles": [{"name": "decode"}, {"name": "decode"}]}, "roles"),
    Case("a relative path on the host", {"spec.model.source": {"hostPath": {"path": "models"}}}, "path"),
    Case(
        "a path that leaves the volume",
        {"spec.model.source": {"pvc": {"claimName": "weights", "path": "../other"}}},
        "path",
    ),
    Case("a model name like a flag", {"spec.model.name": "-v4"}, "name"),
    Case("blanks in the model name", {"spec.model.name": "a b"}, "name"),
    Case("memory in quantities", {"spec.roles.0.resources": {"requests": {"memory": "16Gi", "cpu": 2}}}),
    Case("memory in words", {"spec.roles.0.resources": {"requests": {"memory": "a lot"}}}, "memory"),
    Case("a variable without a name", {"spec.roles.0.template": {"env": [{"value": "1"}]}}, "name"),
    Case("memory below zero", {"spec.roles.0.resources": {"requests": {"memory": "-1"}}}, "memory"),
    Case("a number in quotes", {"spec.roles.0.replicas": "2"}, "replicas"),
    Case("a truth value in words", {"spec.roles.1.parallelism": {"expert": "yes"}}, "expert"),
    Case("a sidecar", {"spec.roles.0.template": {"podSpec": {"containers": [{"name": "x", "image": "x:1"}]}}}),
    Case("a nameless container", {"spec.roles.0.template": {"podSpec": {"containers": [{"image": "x"}]}}}, "name"),
    Case("two claims of one name", {"spec.roles.0.resources": {"claims": [GPUS, GPUS]}}, "claims"),
    Case("a claim from nowhere", {"spec.roles.0.resources": {"claims": [{"name": "gpus"}]}}, "claims"),
    Case("more than all", {"spec.rolloutStrategy": {"maxUnavailable": "101%"}}, "maxUnavailable"),
    Case("a share without its sign", {"spec.rolloutStrategy": {"maxSurge": "25"}}, "maxSurge"),
    Case("part of a percent", {"spec.rolloutStrategy": {"maxSurge": "2.5%"}}, "maxSurge"),
    Case("less than no surge", {"spec.rolloutStrategy": {"maxSurge": -1}}, "maxSurge"),
    Case("more surge than is sensible", {"spec.rolloutStrategy": {"maxSurge": 101}}, "maxSurge"),
    Case("no such way when full", {"spec.rolloutStrategy": {"whenFull": "Panic"}}, "whenFull"),
    Case("a paused roll-out", {"spec.paused": True}),
    Case("any field of a pod", {"spec.roles.0.template": {"podSpec": {"priorityClassName": "high"}}}),
]
