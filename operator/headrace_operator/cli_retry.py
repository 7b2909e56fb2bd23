"""`headrace retry`: ask the operator to make failed groups again at once."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from headrace_operator import names
from headrace_operator.cli_cluster import add_deployment, with_deployment

if TYPE_CHECKING:
    from headrace_operator.cluster import Cluster

_DESCRIPTION = """\
Forgets the failures of groups and has those that are missing made again at once: groups that were given up after
restartPolicy.maxRestarts, and groups that wait for their next try. Groups that are well are left alone.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command and its flags."""
    retry = commands.add_parser("retry", help="make failed groups again at once", description=_DESCRIPTION)
    add_deployment(retry)
    roles = [names.PREFILL, names.DECODE, names.UNIFIED]
    retry.add_argument("--role", choices=roles, help="only groups of this role (default: all roles)")
    retry.add_argument("--group", type=int, metavar="N", help="only group N (default: all groups)")
    retry.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    return with_deployment(args, _retry)


async def _retry(args: argparse.Namespace, cluster: Cluster, body: dict[str, Any]) -> int:
    from headrace_operator.api_status import Status
    from headrace_operator.retry import annotation_for, failed

    status = Status.model_validate(body.get("status") or {})
    chosen = failed(status, args.role, args.group)
    if not chosen:
        print("no such group has failed: nothing to do")
        return 0
    metadata = body["metadata"]
    before = (metadata.get("annotations") or {}).get(names.ANNOTATION_RETRY, "")
    wish = {names.ANNOTATION_RETRY: annotation_for(before, status, chosen)}
    await cluster.apply(
        {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {key: metadata[key] for key in ("name", "namespace", "uid")} | {"annotations": wish},
        },
        names.CLI_MANAGER,
    )
    for rebuild in chosen:
        times = "once" if rebuild.failures == 1 else f"{rebuild.failures} times in a row"
        print(f"{rebuild.role} group {rebuild.group} is made again (it failed {times})")
    return 0
