"""`headrace status`: draw a deployment of the cluster, with what is wrong."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import TYPE_CHECKING, Any

from headrace_operator.cli_cluster import add_deployment, with_deployment

if TYPE_CHECKING:
    from headrace_operator.cluster import Cluster

_DESCRIPTION = """\
Draws roles, groups and pods: which revision each group has, on which node (and in which NVLink domain) each pod sits,
and why what is not ready is not. Conditions and failures follow. Reads KUBECONFIG; changes nothing.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command and its flags."""
    status = commands.add_parser(
        "status", help="show how a deployment in the cluster is doing, and why", description=_DESCRIPTION
    )
    add_deployment(status)
    status.add_argument(
        "-o",
        "--output",
        choices=["text", "json"],
        default="text",
        help="json: {name, namespace, roles (with groups and pods), status (as stored)}; default: %(default)s",
    )
    status.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    return with_deployment(args, _show)


async def _show(args: argparse.Namespace, cluster: Cluster, body: dict[str, Any]) -> int:
    from headrace_operator.observe import observe
    from headrace_operator.picture import as_data, domain_label, drawn, picture
    from headrace_operator.report import status_table

    objects: list[dict[str, Any]] = []
    for kind in ("Pod", "ControllerRevision"):
        listed = await cluster.list_children(kind, args.namespace, args.name)
        objects += [{**item, "kind": kind} for item in listed]
    observed = observe(args.name, body["metadata"]["uid"], objects)
    nodes = {pod.node for pods in observed.groups.values() for pod in pods if pod.node}
    domains = await _domains(cluster, sorted(nodes), domain_label(body))
    roles = picture(body, observed, domains)
    if args.output == "json":
        shown = {"name": args.name, "namespace": args.namespace, "roles": as_data(roles)}
        print(json.dumps({**shown, "status": body.get("status") or {}}, indent=2))
    else:
        print(f"{drawn(roles)}\n{status_table(body)}", end="")
    return 0


async def _domains(cluster: Cluster, nodes: list[str], label: str) -> dict[str, str]:
    """Domain by node; empty without the right to read nodes, which people of a namespace need not have."""
    from headrace_operator.cluster import Refused

    try:
        bodies = await asyncio.gather(*(cluster.get_node(name) for name in nodes))
    except Refused:
        return {}
    labels = {
        name: (body["metadata"].get("labels") or {}).get(label)
        for name, body in zip(nodes, bodies, strict=True)
        if body
    }
    return {name: domain for name, domain in labels.items() if domain}
