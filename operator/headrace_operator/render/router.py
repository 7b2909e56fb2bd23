"""The router: Deployment, Service, disruption budget, and the right to follow EndpointSlices. Pure."""

from __future__ import annotations

from typing import Any

from headrace_operator import names
from headrace_operator.api import Spec
from headrace_operator.api_pods import PodTemplate
from headrace_operator.disruptions import is_guarded
from headrace_operator.render.budgets import router_budget
from headrace_operator.render.nodes import leaving_after
from headrace_operator.render.objects import Owner, http_probe, metadata, stamped
from headrace_operator.render.overlay import with_template
from headrace_operator.render.runtimes.headrace import ROUTER_LEAVE_SECONDS, following_router_command

# What the router may do; the operator must hold the same to grant it.
ROUTER_RULES: list[dict[str, list[str]]] = [
    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
]
# After the drain: streams that were not done end with an error, and the program exits.
_EXIT_SECONDS = 15


def router_objects(owner: Owner, spec: Spec, default_image: str) -> list[dict[str, Any]]:
    """All objects of the router, in the order in which they should be made. Without router pods there are none: a
    Service that leads nowhere, and rights that nobody uses, are of no use to whoever brings a router of their own."""
    if spec.router.replicas == 0:
        return []
    bodies = [*_rights(owner), _service(owner), _deployment(owner, spec, default_image)]
    budgets = [router_budget(owner, _selector(owner))] if is_guarded(spec.router) else []
    return [*map(stamped, bodies), *budgets]


def _rights(owner: Owner) -> list[dict[str, Any]]:
    """A service account that may do what `ROUTER_RULES` says."""
    name = names.router_name(owner.name)
    labels = names.labels(owner.name, names.ROUTER)
    rbac = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata(owner, name, labels)},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "Role",
            "metadata": metadata(owner, name, labels),
            "rules": ROUTER_RULES,
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": metadata(owner, name, labels),
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": owner.namespace}],
        },
    ]


def _service(owner: Owner) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(owner, names.router_service_name(owner.name), names.labels(owner.name, names.ROUTER)),
        "spec": {
            "selector": _selector(owner),
            "ports": [{"name": "http", "port": names.PORT_HTTP, "targetPort": names.PORT_HTTP}],
        },
    }


def _deployment(owner: Owner, spec: Spec, default_image: str) -> dict[str, Any]:
    labels = names.labels(owner.name, names.ROUTER)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(owner, names.router_name(owner.name), labels),
        "spec": {
            "replicas": spec.router.replicas,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "selector": {"matchLabels": _selector(owner)},
            "template": _pod_template(owner, spec, default_image, labels),
        },
    }


def _pod_template(owner: Owner, spec: Spec, default_image: str, labels: dict[str, str]) -> dict[str, Any]:
    added = spec.router.template
    pod = with_template(_pod_spec(owner, spec, default_image), names.CONTAINER_ROUTER, added)
    template = {"metadata": _pod_metadata(added, labels), "spec": pod}
    # As engines are: Kubernetes by itself would leave a deployment without its only router for five minutes.
    return leaving_after(template, spec.restart_policy.node_loss_seconds)


def _pod_metadata(template: PodTemplate, labels: dict[str, str]) -> dict[str, Any]:
    result: dict[str, Any] = {"labels": {**template.labels, **labels}}
    if template.annotations:
        result["annotations"] = dict(template.annotations)
    return result


def _selector(owner: Owner) -> dict[str, str]:
    return {names.LABEL_DEPLOYMENT: owner.name, names.LABEL_COMPONENT: names.ROUTER}


def _pod_spec(owner: Owner, spec: Spec, default_image: str) -> dict[str, Any]:
    drain = spec.drain_timeout_seconds
    command = following_router_command(spec.model.name, "0.0.0.0", names.PORT_HTTP, drain, owner.namespace, owner.name)
    container: dict[str, Any] = {
        "name": names.CONTAINER_ROUTER,
        "image": spec.router.image or default_image,
        "imagePullPolicy": "IfNotPresent",
        "command": command[:1],
        "args": command[1:],
        "ports": [{"name": "http", "containerPort": names.PORT_HTTP}],
        # Not /ready, which needs a group of every role: without endpoints the Service would refuse connections, where
        # the router answers 503 and says what is missing.
        "readinessProbe": http_probe("/synced", period=2, failures=2),
        "livenessProbe": http_probe("/health", period=10, failures=6),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }
    resources = spec.router.resources.as_kubernetes()
    if resources:
        container["resources"] = resources
    return {
        "serviceAccountName": names.router_name(owner.name),
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": ROUTER_LEAVE_SECONDS + drain + _EXIT_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": names.RUN_AS_USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        # Over nodes where there are enough: one lost node should not take all routers.
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": _selector(owner)},
                # Those of the revision that a roll-out replaces are about to leave their nodes.
                "matchLabelKeys": ["pod-template-hash"],
            }
        ],
        "containers": [container],
    }
