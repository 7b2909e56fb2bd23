"""Engine pods. Pure: one pod of one group of one revision.

Pods are owned one by one and never restart in place: a rank that ends takes its group along, and the operator makes the
whole group again. So `restartPolicy: Never`, and names are given, not generated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_operator import names
from headrace_operator.groups import GroupKey
from headrace_operator.render.objects import Owner, http_probe, metadata, stamped
from headrace_operator.render.overlay import with_template
from headrace_operator.render.runtimes.headrace import engine_command
from headrace_operator.render.site import MODEL_MOUNT, Site, cluster_site
from headrace_operator.revision import RoleTemplate

# Loading a large checkpoint from a cold disk may take long; a shorter window would turn slowness into a crash loop.
STARTUP_WINDOW_SECONDS = 7200
# Between the end of a drain and SIGKILL: the engine closes its transfers, its ranks and its clients' connections.
EXIT_SECONDS = 30


def engine_pod(owner: Owner, key: GroupKey, pod: int, template: RoleTemplate) -> dict[str, Any]:
    """Pod `pod` of group `key`, for a cluster."""
    num_pods = template.parallelism.num_pods
    site = cluster_site(owner.name, key.role, key.revision, key.index, num_pods, template.model.source)
    return render_pod(owner, key, pod, template, site)


def render_pod(owner: Owner, key: GroupKey, pod: int, template: RoleTemplate, site: Site) -> dict[str, Any]:
    """Pod `pod` of group `key` at `site`."""
    body = PodIdentity(owner, key.role, key.revision, template).of(key.index, pod)
    spec = with_template(_pod_spec(owner, key, pod, template, site), names.CONTAINER_ENGINE, template.template)
    spec = _with_claims(spec, _claims(owner, key, template))
    # Group members find each other by these.
    spec |= {
        "restartPolicy": "Never",
        "hostname": body["metadata"]["name"],
        "subdomain": names.role_service_name(owner.name, key.role),
    }
    if pod == 0:
        # Beside gates of the template: whoever owns those has a say as well.
        spec["readinessGates"] = [*(spec.get("readinessGates") or ()), {"conditionType": names.GATE_SERVING}]
    return stamped({**body, "spec": spec})


class PodIdentity:
    """Labels and annotations of the pods of one revision: all that may still be written once a pod exists."""

    def __init__(self, owner: Owner, role: str, revision: str, template: RoleTemplate) -> None:
        self._owner = owner
        self._revision = (role, revision)
        self._annotations = dict(template.template.annotations)
        self._labels = {
            **template.template.labels,
            **names.pod_labels(owner.name, role, revision, 0, 0),
            names.LABEL_KV_FINGERPRINT: template.kv_fingerprint,
        }
        of_one = (names.LABEL_GROUP, names.LABEL_POD_INDEX)
        self._of_all = {label: value for label, value in self._labels.items() if label not in of_one}

    def of(self, group: int, pod: int) -> dict[str, Any]:
        """Pod `pod` of a group without its spec."""
        name = names.pod_name(self._owner.name, *self._revision, group, pod)
        body = metadata(self._owner, name, self._labels_of(group, pod), self._annotations)
        return {"apiVersion": "v1", "kind": "Pod", "metadata": body}

    def is_on(self, live: Mapping[str, Any], group: int, pod: int) -> bool:
        """Whether a live pod has all of it."""
        # Every pass asks this of every pod, so no labels are put together here.
        labels, annotations = live["metadata"].get("labels") or {}, live["metadata"].get("annotations") or {}
        return bool(
            labels.get(names.LABEL_GROUP) == str(group)
            and labels.get(names.LABEL_POD_INDEX) == str(pod)
            and labels.items() >= self._of_all.items()
            and annotations.items() >= self._annotations.items()
        )

    def _labels_of(self, group: int, pod: int) -> dict[str, str]:
        return {**self._labels, names.LABEL_GROUP: str(group), names.LABEL_POD_INDEX: str(pod)}


def _pod_spec(owner: Owner, key: GroupKey, pod: int, template: RoleTemplate, site: Site) -> dict[str, Any]:
    group_labels = {
        label: value
        for label, value in names.pod_labels(owner.name, key.role, key.revision, key.index, pod).items()
        if label in (names.LABEL_DEPLOYMENT, names.LABEL_ROLE, names.LABEL_REVISION, names.LABEL_GROUP)
    }
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # The first process of a pid namespace ignores a signal without a handler, and Python takes seconds to start
        # on a busy node: a pod deleted meanwhile would sit out its whole grace. Here the engine is not the first.
        "shareProcessNamespace": True,
        "terminationGracePeriodSeconds": template.drain_timeout_seconds + EXIT_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": names.RUN_AS_USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        # Over nodes where there are enough, together where there are not.
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": group_labels},
            }
        ],
        "containers": [_container(key, pod, template, site)],
        "volumes": [*_model_volume(template), {"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }


def _container(key: GroupKey, pod: int, template: RoleTemplate, site: Site) -> dict[str, Any]:
    command = engine_command(template, key.role, pod, site)
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if _model_volume(template):
        mounts.insert(0, {"name": "model", "mountPath": MODEL_MOUNT, "readOnly": True})
    container: dict[str, Any] = {
        "name": names.CONTAINER_ENGINE,
        "image": template.engine.image,
        "imagePullPolicy": "IfNotPresent",
        "command": command[:2],
        "args": command[2:],
        "env": _environment(template, pod, site),
        "ports": [
            {"name": "http", "containerPort": site.http_port},
            {"name": "rendezvous", "containerPort": site.rendezvous_port},
            {"name": "control", "containerPort": site.control_port},
        ],
        "startupProbe": http_probe("/ready", period=1, failures=STARTUP_WINDOW_SECONDS),
        "readinessProbe": http_probe("/ready", period=2, failures=2),
        "livenessProbe": http_probe("/health", period=10, failures=6),
        # The end of a failed engine's log becomes its exit message, which the resource's status quotes.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
    }
    resources = template.resources.as_kubernetes()
    if resources:
        container["resources"] = resources
    return container


def _claims(owner: Owner, key: GroupKey, template: RoleTemplate) -> dict[str, str]:
    """The pod's device claims: the template that each is made from, by name."""
    claims = {claim.name: claim.resource_claim_template_name for claim in template.resources.claims}
    if template.compute_domain:
        # The driver makes this template when it sees the group's ComputeDomain.
        claims[names.CLAIM_COMPUTE_DOMAIN] = names.group_name(owner.name, key.role, key.revision, key.index)
    return claims


def _with_claims(spec: dict[str, Any], claims: Mapping[str, str]) -> dict[str, Any]:
    """The pod's spec with these claims, beside those that its template has."""
    if not claims:
        return spec
    given = [claim for claim in spec.get("resourceClaims") or () if claim.get("name") not in claims]
    made = [{"name": name, "resourceClaimTemplateName": template} for name, template in claims.items()]
    containers = []
    for container in spec["containers"]:
        if container["name"] == names.CONTAINER_ENGINE:
            resources = container.get("resources") or {}
            used = [claim for claim in resources.get("claims") or () if claim.get("name") not in claims]
            resources = {**resources, "claims": [*used, *({"name": name} for name in claims)]}
            container = {**container, "resources": resources}
        containers.append(container)
    return {**spec, "resourceClaims": [*given, *made], "containers": containers}


def _environment(template: RoleTemplate, pod: int, site: Site) -> list[dict[str, Any]]:
    return [
        {"name": names.ENV_POD_NAME, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": names.ENV_POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": names.ENV_LEADER_ADDRESS, "value": site.leader_host},
        {"name": names.ENV_GROUP_SIZE, "value": str(template.parallelism.num_pods)},
        {"name": names.ENV_WORKER_INDEX, "value": str(pod)},
    ]


def _model_volume(template: RoleTemplate) -> list[dict[str, Any]]:
    source = template.model.source
    if source.host_path:
        return [{"name": "model", "hostPath": {"path": source.host_path.path, "type": "Directory"}}]
    if source.pvc:
        claim = {"claimName": source.pvc.claim_name, "readOnly": True}
        return [{"name": "model", "persistentVolumeClaim": claim}]
    return []
