"""Every name that others see: labels, annotations, ports, environment, reasons, and the names of objects.

One place, so that a label is never spelled twice. The engine keeps its own copies of what both sides need (ports,
roles); a contract test pins them equal. Pure: strings in, strings out.
"""

from __future__ import annotations

import re

GROUP = "headrace.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "DisaggDeployment"
PLURAL = "disaggdeployments"
SINGULAR = "disaggdeployment"
SHORT_NAME = "dd"
SCALER_KIND = "DisaggRoleScaler"
SCALER_PLURAL = "disaggrolescalers"
SCALER_SINGULAR = "disaggrolescaler"
SCALER_SHORT_NAME = "drs"

MANAGER = "headrace-operator"  # field manager of every write, and the value of the managed-by label
# Gives labels back to objects whose other fields are fixed; under the name above the apply would drop those fields.
METADATA_MANAGER = f"{MANAGER}-metadata"
# NVIDIA's DRA driver for GPUs: the nodes of a ComputeDomain share GPU memory over NVLink.
COMPUTE_DOMAIN_KIND = "ComputeDomain"
CLAIM_COMPUTE_DOMAIN = "compute-domain"  # of a pod, for a channel of its group's domain

# Gangs: whose scheduler binds all pods of a group or none.
GANG_NATIVE = "Native"
GANG_VOLCANO = "Volcano"
GANG_KUEUE = "Kueue"
WORKLOAD_KIND = "Workload"  # of scheduling.k8s.io; Kueue's own Workloads are its business
WORKLOAD_POD_GROUP = "group"  # the one pod group within a Workload of ours
VOLCANO_KIND = "PodGroup"
VOLCANO_SCHEDULER = "volcano"
ANNOTATION_VOLCANO_GROUP = "scheduling.k8s.io/group-name"
KUEUE_GROUP = "kueue.x-k8s.io"
LABEL_KUEUE_QUEUE = f"{KUEUE_GROUP}/queue-name"
LABEL_KUEUE_GROUP = f"{KUEUE_GROUP}/pod-group-name"
ANNOTATION_KUEUE_COUNT = f"{KUEUE_GROUP}/pod-group-total-count"
LABEL_KUEUE_MANAGED = f"{KUEUE_GROUP}/managed"  # Kueue's own mark on the pods that it looks at
FINALIZER_KUEUE = f"{KUEUE_GROUP}/managed"  # keeps pods until Kueue has seen how they ended
ANNOTATION_KUEUE_RETRIABLE = f"{KUEUE_GROUP}/retriable-in-group"

CLI_MANAGER = "headrace"  # of what the `headrace` command writes for a user

# Roles.
PREFILL = "prefill"
DECODE = "decode"
UNIFIED = "unified"
ROLES = (PREFILL, DECODE, UNIFIED)
ROUTER = "router"  # a component, not a role
LEADERS = "leaders"  # of a role's groups

# Labels of every child. Children are found by LABEL_MANAGED_BY and LABEL_DEPLOYMENT, and believed by owner uid.
LABEL_NAME = "app.kubernetes.io/name"
LABEL_INSTANCE = "app.kubernetes.io/instance"
LABEL_COMPONENT = "app.kubernetes.io/component"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_DEPLOYMENT = f"{GROUP}/deployment"
LABEL_ROLE = f"{GROUP}/role"
LABEL_REVISION = f"{GROUP}/revision"
LABEL_GROUP = f"{GROUP}/group"
LABEL_POD_INDEX = f"{GROUP}/pod-index"
LABEL_KV_FINGERPRINT = f"{GROUP}/kv-fingerprint"  # groups can pair iff equal, as far as the resource tells
LABEL_LLM_D_ROLE = "llm-d.ai/role"  # so that other routers can follow our pods unmodified

# Hash of the object as last applied: tells "another version renders it otherwise" from "edited by hand".
ANNOTATION_APPLIED = f"{GROUP}/applied"

# On a DisaggDeployment: failed groups to be made again at once, as `ROLE/GROUP@TIME` with blanks between them.
ANNOTATION_RETRY = f"{GROUP}/retry"

# Readiness gate of leader pods: True while routers may send requests to the group.
GATE_SERVING = f"{GROUP}/serving"

# Ports.
RUN_AS_USER = 65532  # of every container: no user of any base image, as in distroless images

PORT_HTTP = 8000  # router and engines
PORT_RENDEZVOUS = 29500  # torch TCPStore of a group, on its leader
PORT_CONTROL = 29501  # ZMQ between a group's frontend and its ranks, on its leader
PORT_OPERATOR = 9090  # the operator's metrics and probes

# Environment of engine pods.
ENV_POD_NAME = "HEADRACE_POD_NAME"
ENV_POD_IP = "HEADRACE_POD_IP"
ENV_LEADER_ADDRESS = "LWS_LEADER_ADDRESS"
ENV_GROUP_SIZE = "LWS_GROUP_SIZE"
ENV_WORKER_INDEX = "LWS_WORKER_INDEX"

# Environment of the operator.
ENV_ENGINE_IMAGE = "HEADRACE_ENGINE_IMAGE"
ENV_ROUTER_IMAGE = "HEADRACE_ROUTER_IMAGE"

CONTAINER_ENGINE = "engine"
CONTAINER_ROUTER = "router"

# Condition types.
VALID = "Valid"  # the stored spec passes the rules
AVAILABLE = "Available"  # requests can be served now, perhaps by fewer groups than wanted
PROGRESSING = "Progressing"  # the operator is changing something
SCALING_LIMITED = "ScalingLimited"  # a wish of a DisaggRoleScaler was cut; not where scaling.mode is Static
READY = "Ready"  # every wanted group and the router is ready, all at the wanted revision
PROTECTED = "Protected"  # draining nodes leaves groups of every role, and routers, at work

# Reasons.
REASON_SPEC_ACCEPTED = "SpecAccepted"
REASON_SPEC_INVALID = "SpecInvalid"
REASON_ALL_READY = "AllGroupsReady"
REASON_SERVING = "Serving"
REASON_SETTLED = "Settled"
REASON_CREATING = "Creating"
REASON_ROLLING_OUT = "RollingOut"
REASON_REBUILDING = "RebuildingGroup"
REASON_DELETING = "DeletingPods"
REASON_REFUSED = "ApplyRefused"
REASON_NAME_TAKEN = "NameTaken"
REASON_IMAGE_PULL = "ImagePull"
REASON_CRASH_LOOP = "CrashLoop"
REASON_RESTARTS_EXHAUSTED = "RestartsExhausted"
REASON_UNSCHEDULABLE = "Unschedulable"
REASON_SCHEDULING_GATED = "SchedulingGated"
REASON_WAITING_FOR_CLAIM = "WaitingForClaim"
REASON_PROBE_FAILING = "ProbeFailing"
REASON_WAITING_FOR_GROUP = "WaitingForGroup"
REASON_STARTING = "Starting"
REASON_BUDGETED = "Budgeted"
REASON_SINGLE_GROUP = "SingleGroup"
REASON_SINGLE_ROUTER = "SingleRouter"
REASON_DRAINING = "Draining"
REASON_NODE_LOST = "NodeLost"
REASON_CANNOT_START = "CannotStart"
REASON_ROUTER_NOT_READY = "RouterNotReady"
REASON_SCALED_TO_ZERO = "ScaledToZero"
REASON_NO_CAPACITY = "NoCapacity"
REASON_CAPACITY_UNKNOWN = "CapacityUnknown"
REASON_API_MISSING = "ApiMissing"
REASON_WAITING_FOR_COMPUTE_DOMAIN = "WaitingForComputeDomain"
REASON_REPAIRS_PAUSED = "RepairsPaused"
REASON_WITHIN_BOUNDS = "WithinBounds"
REASON_RATIO_BOUND = "RatioBound"
REASON_WOULD_MOVE = "WouldMove"  # a dry run of scaling.mode Auto
REASON_SHRINKING_FIRST = "ShrinkingFirst"
REASON_WAITING_FOR_PAIR = "WaitingForPair"
REASON_PAUSED = "Paused"
REASON_DEADLINE = "ProgressDeadlineExceeded"

# Reasons of events; a condition's reason is used as one too.
EVENT_SCALED = "GroupsScaled"
EVENT_REBALANCED = "Rebalanced"  # scaling.mode Auto has moved groups, and why
EVENT_ADVISED = "RebalanceAdvised"  # it would have, were it not a dry run

# Limits that keep every name below within 63 characters.
MAX_GROUPS = 1000  # three digits
MAX_PODS_PER_GROUP = 1000  # three digits
REVISION_LENGTH = 8
MAX_NAME_LENGTH = 63 - len(f"-{UNIFIED}-{'0' * REVISION_LENGTH}-999-999")

_OF_A_ROLE = re.compile(rf".+-({'|'.join(ROLES)})")
_OF_A_REVISION = re.compile(rf".+-({'|'.join(ROLES)})-([0-9a-f]{{{REVISION_LENGTH}}})")
_OF_A_POD = re.compile(rf"{_OF_A_REVISION.pattern}-([0-9]{{1,3}})-([0-9]{{1,3}})")


def revision_name(deployment: str, role: str, revision: str) -> str:
    """The ControllerRevision of a role's revision."""
    return f"{deployment}-{role}-{revision}"


def group_name(deployment: str, role: str, revision: str, group: int) -> str:
    """The ComputeDomain of a group, and the claim template that is made for it."""
    return f"{revision_name(deployment, role, revision)}-{group}"


def gang_name(deployment: str, role: str, group: int, life: str) -> str:
    """The gang of one life of a group; `life` has eight characters."""
    return f"{deployment}-{role}-{group}-{life}"


def pod_name(deployment: str, role: str, revision: str, group: int, pod: int) -> str:
    return f"{group_name(deployment, role, revision, group)}-{pod}"


def place_of_pod(pod: str) -> tuple[str, str, int, int] | None:
    """(role, revision, group, pod) that `pod_name` made a name of; None if it did not. Labels say the same, but anyone
    can take them away."""
    found = _OF_A_POD.fullmatch(pod)
    return (found[1], found[2], int(found[3]), int(found[4])) if found else None


def place_of_revision(name: str) -> tuple[str, str]:
    """(role, revision) that `revision_name` made a name of; empty if it did not."""
    found = _OF_A_REVISION.fullmatch(name)
    return (found[1], found[2]) if found else ("", "")


def role_of_scaler(scaler: str) -> str:
    """The role that `scaler_name` made a name of; empty if it did not."""
    found = _OF_A_ROLE.fullmatch(scaler)
    return found[1] if found else ""


def leader_host(deployment: str, role: str, revision: str, group: int) -> str:
    """DNS name of a group's pod 0, resolvable within the namespace before the pod is ready."""
    return f"{pod_name(deployment, role, revision, group, 0)}.{role_service_name(deployment, role)}"


def role_service_name(deployment: str, role: str) -> str:
    """The headless Service of a role's leaders: their ranks meet there, and the router follows its EndpointSlices."""
    return f"{deployment}-{role}-{LEADERS}"


def budget_name(deployment: str, role: str) -> str:
    """The PodDisruptionBudget of a role's pods."""
    return role_service_name(deployment, role)


def scaler_name(deployment: str, role: str) -> str:
    """The DisaggRoleScaler of a role."""
    return f"{deployment}-{role}"


def router_service_name(deployment: str) -> str:
    return deployment


def router_name(deployment: str) -> str:
    """Deployment, ServiceAccount, Role, RoleBinding and PodDisruptionBudget of the router."""
    return f"{deployment}-{ROUTER}"


def labels(deployment: str, component: str) -> dict[str, str]:
    """Labels that every child carries."""
    return {
        LABEL_NAME: "headrace",
        LABEL_INSTANCE: deployment,
        LABEL_COMPONENT: component,
        LABEL_MANAGED_BY: MANAGER,
        LABEL_DEPLOYMENT: deployment,
    }


def role_labels(deployment: str, role: str) -> dict[str, str]:
    return {**labels(deployment, role), LABEL_ROLE: role}


def revision_labels(deployment: str, role: str, revision: str) -> dict[str, str]:
    return {**role_labels(deployment, role), LABEL_REVISION: revision}


def leader_labels(deployment: str, role: str) -> dict[str, str]:
    """What selects the leaders of a role's groups, of every revision."""
    return {LABEL_DEPLOYMENT: deployment, LABEL_ROLE: role, LABEL_POD_INDEX: "0"}


def pod_labels(deployment: str, role: str, revision: str, group: int, pod: int) -> dict[str, str]:
    return {
        **revision_labels(deployment, role, revision),
        LABEL_GROUP: str(group),
        LABEL_POD_INDEX: str(pod),
        LABEL_LLM_D_ROLE: role,
    }
