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
    from headrace_operator.forecast import Forecast

_DESCRIPTION = """\
Prints what the operator would do, step by step, if FILE were applied now; nothing is changed. It runs the operator's
own planner against what is in the cluster, taking for granted that pods become ready and no one else takes room.
Without the cluster: --state with the objects of the deployment, from
  kubectl get dd,pods,controllerrevisions,disaggrolescalers -o yaml
Exit code 1 if the change would not come to its end.
"""
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
        help="GPUs (pods, if nothing asks for GPUs) that are free for more groups (default: any number)",
    )
    plan.add_argument("-o", "--output", choices=["text", "json"], default="text", help="default: %(default)s")
    plan.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from headrace_operator.cluster import ClusterError

    deployment = load(args.file)
    name, metadata = deployment.metadata.name, deployment.metadata
    namespace = args.namespace or (metadata.namespace if "namespace" in metadata.model_fields_set else None)
    try:
        objects = _read(args.state) if args.state else asyncio.run(_fetch(deployment, namespace, args.context))
    except (ClusterError, OSError) as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 1
    stored = next((o for o in objects if o["kind"] == names.KIND and o["metadata"]["name"] == name), None)
    result = _forecast(deployment, stored, objects, args.free)
    if args.output == "json":
        print(json.dumps({"name": name, "exists": stored is not None, **as_data(result)}, indent=2))
    else:
        print(as_text(name if stored else f"{name} (which does not exist yet)", result, args.free))
    return 1 if result.blocked else 0


def _read(path: str) -> list[dict[str, Any]]:
    """Objects of a List, or of several documents. Raises ManifestError."""
    try:
        documents = list(yaml.safe_load_all(Path(path).read_text()))
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ManifestError(f"{path}: not YAML: {error}") from error
    objects = []
    for document in documents:
        items = document.get("items", [document]) if isinstance(document, dict) else []
        objects += [item for item in items if isinstance(item, dict) and {"kind", "metadata"} <= item.keys()]
    if not objects:
        raise ManifestError(f"{path}: has no objects; it is to be what `kubectl get ... -o yaml` prints")
    return objects


async def _fetch(deployment: DisaggDeployment, namespace: str | None, context: str | None) -> list[dict[str, Any]]:
    from headrace_operator.connection import connect

    name = deployment.metadata.name
    # Whoever may see a deployment need not be allowed to see scalers, which only this mode has.
    kinds = [*_KINDS, *([names.SCALER_KIND] if deployment.spec.scaling.mode == EXTERNAL else [])]
    async with connect(context) as cluster:
        namespace = namespace or cluster.namespace
        resource = await cluster.get(names.KIND, namespace, name)
        objects = [{"kind": names.KIND, **resource}] if resource else []
        for kind in kinds:
            objects += [{**body, "kind": kind} for body in await cluster.list_children(kind, namespace, name)]
        return objects


def _forecast(
    deployment: DisaggDeployment, stored: dict[str, Any] | None, objects: list[dict[str, Any]], num_free: int | None
) -> Forecast:
    from headrace_operator.api_status import Status
    from headrace_operator.forecast import forecast
    from headrace_operator.observe import observe
    from headrace_operator.planning import known_templates, role_states, strategy_of
    from headrace_operator.scaling import scaled

    name = deployment.metadata.name
    uid = stored["metadata"]["uid"] if stored else ""
    status = Status.model_validate((stored or {}).get("status") or {})
    children = [
        o for o in objects if (o["metadata"].get("labels") or {}).get(names.LABEL_DEPLOYMENT) == name and stored
    ]
    observed, now = observe(name, uid, children), time.time()
    wanted = scaled(deployment, observed, status, now).deployment
    templates, revisions = known_templates(wanted, observed, engine_image="")
    states = role_states(wanted, observed, status, templates, revisions)
    return forecast(states, strategy_of(wanted), now, num_free)


def as_data(result: Forecast) -> dict[str, Any]:
    """The forecast as plain data."""
    return {
        "steps": [
            {
                "actions": [
                    {
                        "verb": action.verb,
                        "role": action.group.role,
                        "group": action.group.index,
                        "revision": action.group.revision,
                        "pods": action.num_pods,
                    }
                    for action in step.actions
                ],
                "available": dict(step.available),
                "inUse": step.num_in_use,
            }
            for step in result.steps
        ],
        "unit": result.unit,
        "blocked": list(result.blocked),
    }


def as_text(name: str, result: Forecast, num_free: int | None) -> str:
    """The forecast for people: one paragraph a step."""
    num_steps = len(result.steps)
    what = f"{num_steps} step{'s' if num_steps > 1 else ''}" if num_steps else "nothing to do"
    lines = [f"{name}: {'no step can be taken' if result.blocked and not num_steps else what}"]
    for number, step in enumerate(result.steps, start=1):
        counts = ", ".join(f"{role} {count}" for role, count in step.available)
        lines.append(f"{number}. meanwhile available: {counts}; in use: {step.num_in_use} {result.unit}")
        for action in step.actions:
            key = action.group
            pods = f"{action.num_pods} pod{'s' if action.num_pods > 1 else ''}"
            lines.append(f"   {action.verb:<6} {key.role} group {key.index}, revision {key.revision} ({pods})")
    lines += [f"stops there: {reason}" for reason in result.blocked]
    is_growing = any(action.verb == "make" for step in result.steps for action in step.actions)
    if num_free is None and is_growing:
        lines.append(
            f"room for all of it is taken for granted; --free N says how many {result.unit} there are to spare"
        )
    return "\n".join(lines)
