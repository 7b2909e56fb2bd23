"""From a pod of the API server to the planner's `Pod`. Pure: a dict in, frozen data out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headrace_operator import names
from headrace_operator.groups import Gate, Pod, Trouble
from headrace_operator.times import epoch_seconds

Body = Mapping[str, Any]

_PULL_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
_CONFIG_REASONS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_MAX_MESSAGE = 1024
_MAX_LAST_WORDS = 2560  # a kubelet keeps 2048 bytes of a failed container's log


def pod_facts(body: Body, index: int) -> Pod:
    """What the planner reads of pod `index` of a group."""
    status = body.get("status") or {}
    deletion = body["metadata"].get("deletionTimestamp")
    ready = _condition(status, "Ready")
    is_ready = ready.get("status") == "True"
    engine = _engine(status)
    return Pod(
        name=body["metadata"]["name"],
        uid=body["metadata"]["uid"],
        index=index,
        phase=_phase(status),
        is_ready=is_ready,
        deadline=epoch_seconds(deletion) if deletion else None,
        is_edited=_is_edited(body),
        is_restarted=bool(engine.get("restartCount")),
        ready_since=_time_of(ready, "lastTransitionTime") if is_ready else None,
        finished_at=_time_of(_ended(engine), "finishedAt"),
        unschedulable_since=_unschedulable_since(status),
        node=str((body.get("spec") or {}).get("nodeName") or ""),
        address=str(status.get("podIP") or ""),
        is_well=_condition(status, "ContainersReady").get("status") == "True",
        gate=_gate(body),
        gate_since=_time_of(_condition(status, names.GATE_SERVING), "lastTransitionTime"),
        is_suspect=_is_suspect(body),
        trouble=pod_trouble(body),
    )


def _is_suspect(body: Body) -> bool:
    """Whether a pod looks as if its node had gone: it does not end, or it was made unready behind its kubelet's back.

    The controller that finds a node silent sets Ready of its pods and leaves what the kubelet said of the containers.
    """
    status = body.get("status") or {}
    if _phase(status) in ("Failed", "Succeeded"):
        return False
    is_unready = _condition(status, "Ready").get("status") == "False"
    is_well = _condition(status, "ContainersReady").get("status") == "True"
    is_shut = _gate(body) in (Gate.UNSET, Gate.CLOSED)  # which makes it unready as well
    return bool(body["metadata"].get("deletionTimestamp")) or (is_unready and is_well and not is_shut)


def _gate(body: Body) -> Gate:
    gates = (body.get("spec") or {}).get("readinessGates") or ()
    if not any(gate.get("conditionType") == names.GATE_SERVING for gate in gates):
        return Gate.NONE
    status = _condition(body.get("status") or {}, names.GATE_SERVING).get("status")
    return Gate.UNSET if status is None else Gate.OPEN if status == "True" else Gate.CLOSED


def _engine(status: Body) -> Body:
    """Status of the engine's container."""
    for container in status.get("containerStatuses") or ():
        if container.get("name") == names.CONTAINER_ENGINE:
            return dict(container)
    return {}


def _ended(container: Body) -> Body:
    """How a container ended: now, or before it was started again."""
    for key in ("state", "lastState"):
        ended = (container.get(key) or {}).get("terminated")
        if ended:
            return dict(ended)
    return {}


def _time_of(body: Body, key: str) -> float | None:
    """Epoch seconds of a time that may be missing."""
    return epoch_seconds(body[key]) if body.get(key) else None


def _unschedulable_since(status: Body) -> float | None:
    scheduled = _condition(status, "PodScheduled")
    # Another reason is SchedulingGated: whoever put the gate there is not done yet.
    if scheduled.get("status") != "False" or scheduled.get("reason") != "Unschedulable":
        return None
    return _time_of(scheduled, "lastTransitionTime")


def _phase(status: Body) -> str:
    """The pod's phase, or how the engine ended: a pod goes on Running while any sidecar does."""
    ended = (_engine(status).get("state") or {}).get("terminated")
    if ended:
        return "Failed" if ended.get("exitCode") else "Succeeded"
    return str(status.get("phase", "Pending"))


def _is_edited(body: Body) -> bool:
    """Whether someone else changed a container's image in place: the only edit of a pod that changes what runs.

    Not compared with what we would render, because admission may rightly rewrite images (a mirror); but a change after
    creation raises the pod's generation and is signed in managedFields.
    """
    if int(body["metadata"].get("generation") or 1) <= 1:
        return False
    for entry in body["metadata"].get("managedFields") or ():
        containers = ((entry.get("fieldsV1") or {}).get("f:spec") or {}).get("f:containers") or {}
        if entry.get("manager") != names.MANAGER and any("f:image" in fields for fields in containers.values()):
            return True
    return False


def pod_trouble(body: Body) -> Trouble | None:
    """Why a pod is not ready, or None if it is."""
    name = body["metadata"]["name"]
    status = body.get("status") or {}
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    is_restarted = bool(_engine(status).get("restartCount"))
    if is_restarted or _phase(status) in ("Failed", "Succeeded"):
        return Trouble(names.REASON_CRASH_LOOP, _end_message(name, status, containers))
    if _condition(status, "Ready").get("status") == "True":
        return None
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("status") == "False":
        gates = [gate.get("name") for gate in (body.get("spec") or {}).get("schedulingGates") or ()]
        if gates and scheduled.get("reason") == "SchedulingGated":
            text = f"pod {name} waits until its scheduling gates are removed by whoever set them: {', '.join(gates)}"
            gang = (body["metadata"].get("labels") or {}).get(names.LABEL_KUEUE_GROUP)
            if gang:
                text += f" (why: kubectl describe workloads.{names.KUEUE_GROUP} {gang})"
            return Trouble(names.REASON_SCHEDULING_GATED, text)
        return Trouble(names.REASON_UNSCHEDULABLE, _shortened(f"pod {name}: {scheduled.get('message', 'no node')}"))
    unmade = _unmade_claims(body)
    if unmade:
        text = f"pod {name} waits for its device claims: {', '.join(unmade)} (is the template there, and its driver?)"
        return Trouble(names.REASON_WAITING_FOR_CLAIM, text)
    for container in containers:
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        text = _shortened(f"pod {name}: {reason}: {waiting.get('message', '')}".rstrip(": "))
        if reason in _PULL_REASONS:
            return Trouble(names.REASON_IMAGE_PULL, text)
        if reason in _CONFIG_REASONS:
            return Trouble(names.REASON_CANNOT_START, text)
        if reason == "ContainerCreating":
            # A volume that cannot be mounted shows nowhere else than in events.
            text = f"pod {name} is starting: its image, volumes or network are awaited (kubectl describe pod {name})"
            return Trouble(names.REASON_STARTING, text)
    if _condition(status, names.GATE_SERVING).get("status") == "False":
        return Trouble(names.REASON_DRAINING, f"pod {name} is out of service")
    if any(container.get("started") and not container.get("ready") for container in containers):
        return Trouble(names.REASON_PROBE_FAILING, f"pod {name} has started but its readiness probe fails")
    return Trouble(names.REASON_STARTING, f"pod {name} is starting")


def _unmade_claims(body: Body) -> list[str]:
    """The device claims of a pod that are not made yet. Until they are the scheduler passes it over in silence."""
    spec, status = body.get("spec") or {}, body.get("status") or {}
    if spec.get("nodeName") or _condition(status, "PodScheduled"):
        return []
    made = {claim["name"] for claim in status.get("resourceClaimStatuses") or () if claim.get("resourceClaimName")}
    return [
        f"{claim['name']} of the ResourceClaimTemplate {claim['resourceClaimTemplateName']}"
        for claim in spec.get("resourceClaims") or ()
        if claim.get("resourceClaimTemplateName") and claim.get("name") not in made
    ]


def _end_message(pod: str, status: Body, containers: Iterable[Body]) -> str:
    """How a pod ended: exit code and reason first, the container's last words after a line break."""
    ends = [(container, _ended(container)) for container in containers]
    for container, ended in sorted(ends, key=lambda end: not end[1].get("exitCode")):  # failures first
        if ended:
            reason = ended.get("reason") or "Error"
            head = f"pod {pod}: container {container['name']} exited with code {ended.get('exitCode')} ({reason})"
            tail = str(ended.get("message") or "").strip()
            room = _MAX_LAST_WORDS - len(head)
            return f"{head}\n{tail[-room:]}" if tail else head
    reason = status.get("reason") or status.get("phase")
    return _shortened(f"pod {pod} ended: {reason}: {status.get('message', '')}".rstrip(": "))


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_MESSAGE else f"{text[: _MAX_MESSAGE - 3]}..."


def _condition(status: Body, kind: str) -> Body:
    for condition in status.get("conditions") or ():
        if condition.get("type") == kind:
            return dict(condition)
    return {}
