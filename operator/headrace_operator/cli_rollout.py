"""`headrace plan-rollout`: the steps that applying a file would take."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from headrace_operator import names
from headrace_operator.api_scaling import EXTERNAL
from headrace_operator.cli_cluster import add_context
from headrace_operator.manifests import ManifestError, load

if TYPE_CHECKING:
    from headrace_operator.api import DisaggDeployment
    from headrace_operator.census import Census
    from headrace_operator.cluster import Cluster
    from headrace_operator.outlook import Scene

_DESCRIPTION = """\
Prints what the operator would do, step by step, if FILE were applied now, and where it would wait for room; nothing is
changed. It runs the operator's own planner against what is in the cluster, taking for granted that pods become ready
and no one else takes room. For the room it lists the nodes, and the pods of all namespaces; whoever may not do that
gets the steps with as much room as they need.
Without the cluster: --state with the objects of the deployment, and with the nodes and what is on them if room counts:
  kubectl get dd,pods,controllerrevisions,disaggrolescalers -o yaml > state.yaml
  (echo ---; kubectl get nodes,pods -A -o yaml) >> state.yaml
Exit code 1 if the change would not come to its end.
"""
_EXPECTED = "the file is to be what `kubectl get ... -o yaml` prints"
_KINDS = ("Pod", "ControllerRevision")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command and its flags."""
    plan = commands.add_parser(
        "plan-rollout",
        help="print the steps that applying a file would take",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_argument("file", help="YAML or JSON file with one DisaggDeployment; - reads standard input")
    plan.add_argument("-n", "--namespace", help="default: that of the file, or of the kubeconfig's context, or default")
    add_context(plan)
    plan.add_argument("--state", metavar="FILE", help="the objects that exist, instead of asking the cluster")
    plan.add_argument(
        "--free",
        type=int,
        metavar="N",
        help="GPUs (pods, if nothing asks for GPUs) that are free for more groups, wherever they are (default: what "
        "the nodes have free)",
    )
    plan.add_argument("-o", "--output", choices=["text", "json"], default="text", help="default: %(default)s")
    plan.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from headrace_operator.cluster import ClusterError
    from headrace_operator.forecast_text import as_data, as_text
    from headrace_operator.outlook import outlook

    deployment = load(args.file)
    name, metadata = deployment.metadata.name, deployment.metadata
    args.namespace = args.namespace or (metadata.namespace if "namespace" in metadata.model_fields_set else None)
    try:
        scene = _read(args, name) if args.state else asyncio.run(_fetch(args, deployment))
    except (ClusterError, OSError) as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 1
    result = outlook(deployment, scene, time.time(), args.free)
    room = "number" if args.free is not None else "nodes" if scene.census else "unlimited"
    if args.output == "json":
        print(json.dumps({"name": name, "exists": scene.stored is not None, "room": room, **as_data(result)}, indent=2))
    else:
        print(as_text(name if scene.stored else f"{name} (which does not exist yet)", result, room != "unlimited"))
    return 1 if result.blocked else 0


def _read(args: argparse.Namespace, name: str) -> Scene:
    """What a file says that there is. Raises ManifestError."""
    from headrace_operator.outlook import Scene, counted

    objects = _objects(args.state)
    found = [body for body in objects if body["kind"] == names.KIND and body["metadata"].get("name") == name]
    if args.namespace:
        found = [body for body in found if body["metadata"].get("namespace", args.namespace) == args.namespace]
    if len(found) > 1:
        raise ManifestError(f"{args.state}: has {len(found)} of the name {name}; -n says which namespace is meant")
    stored = found[0] if found else None
    if stored and not stored["metadata"].get("uid"):
        raise ManifestError(f"{args.state}: {name} has no metadata.uid; {_EXPECTED}")
    namespace = args.namespace or (stored["metadata"].get("namespace") if stored else None) or "default"
    try:
        return Scene(namespace, stored, objects, counted(objects))
    except ValueError as error:
        raise ManifestError(f"{args.state}: {error}") from error


def _objects(path: str) -> list[dict[str, Any]]:
    """Objects of Lists, or of several documents. Raises ManifestError."""
    try:
        documents = list(yaml.safe_load_all(Path(path).read_text()))
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ManifestError(f"{path}: not YAML: {error}") from error
    objects = []
    for document in documents:
        items = document.get("items", [document]) if isinstance(document, dict) else []
        objects += [item for item in items or () if isinstance(item, dict) and {"kind", "metadata"} <= item.keys()]
    wrong = next((item for item in objects if not isinstance(item["metadata"], dict)), None)
    if wrong:
        raise ManifestError(f"{path}: the metadata of a {wrong['kind']} is no object; {_EXPECTED}")
    if not objects:
        raise ManifestError(f"{path}: has no objects; {_EXPECTED}")
    return objects


async def _fetch(args: argparse.Namespace, deployment: DisaggDeployment) -> Scene:
    """What is in the cluster. Raises ClusterError."""
    from headrace_operator.connection import connect
    from headrace_operator.outlook import Scene

    name = deployment.metadata.name
    # Whoever may see a deployment need not be allowed to see scalers, which only this mode has.
    kinds = [*_KINDS, *([names.SCALER_KIND] if deployment.spec.scaling.mode == EXTERNAL else [])]
    async with connect(args.context) as cluster:
        namespace = args.namespace or cluster.namespace
        stored = await cluster.get(names.KIND, namespace, name)
        census = await _census(cluster) if args.free is None else None
        objects: list[dict[str, Any]] = []
        for kind in kinds:
            objects += [{**body, "kind": kind} for body in await cluster.list_children(kind, namespace, name)]
        return Scene(namespace, stored, objects, census)


async def _census(cluster: Cluster) -> Census | None:
    """What the nodes have and what is taken of it; None, and a line on standard error, without the right to see it."""
    from headrace_operator.census import Census
    from headrace_operator.cluster import Refused
    from headrace_operator.watching import pages

    census = Census()
    refused: dict[str, str] = {}
    for kind, plural, see in (("Node", "nodes", census.see_node), ("Pod", "pods", census.see_pod)):
        try:
            async for bodies, _ in pages(cluster, kind):
                for body in bodies:
                    see(body)
        except Refused as error:
            refused[plural] = str(error)
    if not refused:
        return census
    why = f"you may not list the {' and '.join(refused)} of the whole cluster ({'; '.join(refused.values())})"
    print(f"headrace: planned without the room that the nodes have: {why}", file=sys.stderr)
    return None
