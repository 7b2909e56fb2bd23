"""`headrace rollout history` and `headrace rollout undo`: earlier specs of a deployment, all roles together."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from headrace_operator import names
from headrace_operator.cli_cluster import add_deployment, with_deployment

if TYPE_CHECKING:
    from headrace_operator.cluster import Cluster

_UNDO = """\
Puts the templates of an earlier revision back into the spec, for all roles together; numbers of groups stay. The
operator then rolls back as it rolls forward. Whoever keeps the spec in a repository should change it there too.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The commands and their flags."""
    rollout = commands.add_parser("rollout", help="earlier revisions of a deployment: list them, go back to one")
    verbs = rollout.add_subparsers(required=True, metavar="VERB")
    history = verbs.add_parser("history", help="list the revisions, the oldest first, and what each changed")
    history.add_argument("-o", "--output", choices=["table", "json"], default="table", help="default: %(default)s")
    undo = verbs.add_parser("undo", help="go back to an earlier revision", description=_UNDO)
    undo.add_argument("--to", type=int, metavar="N", help="number of the revision (default: the one before)")
    for parser, run in ((history, _history), (undo, _undo)):
        add_deployment(parser)
        parser.set_defaults(run=run)


def _history(args: argparse.Namespace) -> int:
    return with_deployment(args, _print_history)


def _undo(args: argparse.Namespace) -> int:
    return with_deployment(args, _go_back)


async def _entries(args: argparse.Namespace, cluster: Cluster, body: dict[str, Any]) -> list[Any]:
    """The revisions that are kept of the deployment, the oldest first."""
    from headrace_operator.history import entries
    from headrace_operator.observe import controller_uid

    stored = await cluster.list_children("ControllerRevision", args.namespace, args.name)
    own = [each for each in stored if controller_uid(each) == body["metadata"]["uid"]]
    return list(entries(own, [role["name"] for role in body["spec"]["roles"]]))


async def _print_history(args: argparse.Namespace, cluster: Cluster, body: dict[str, Any]) -> int:
    found = await _entries(args, cluster, body)
    if args.output == "json":
        print(json.dumps(history_data(found), indent=2))
    else:
        print(history_table(found), end="")
    return 0


async def _go_back(args: argparse.Namespace, cluster: Cluster, body: dict[str, Any]) -> int:
    from headrace_operator.history import CannotUndo, chosen, restored

    try:
        entry = chosen(await _entries(args, cluster, body), args.to)
        wanted = restored({**body, "apiVersion": names.API_VERSION, "kind": names.KIND}, entry)
    except CannotUndo as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 1
    if _is_same(wanted, body):
        print(f"the spec is that of revision {entry.number} already: nothing to do")
        return 0
    await cluster.replace(wanted)
    print(f"{args.name} goes back to revision {entry.number}")
    return 0


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two resources say the same. What is stored has its defaults written out."""
    from pydantic import ValidationError

    from headrace_operator.api import DisaggDeployment

    try:
        return DisaggDeployment.from_stored(one).spec == DisaggDeployment.from_stored(other).spec
    except ValidationError:
        return False  # going back may be what makes it valid


def history_data(found: list[Any]) -> list[dict[str, Any]]:
    """The entries as plain data."""
    from headrace_operator.history import changed_fields

    return [
        {"number": entry.number, "revisions": dict(entry.revisions), "changed": changed_fields(before, entry)}
        for before, entry in zip([None, *found], found, strict=False)
    ]


def history_table(found: list[Any]) -> str:
    """The entries for people, one a line."""
    lines = []
    for item in history_data(found):
        revisions = ", ".join(f"{role} {revision}" for role, revision in item["revisions"].items())
        changed = f": {', '.join(item['changed'])}" if item["changed"] else ""
        lines.append(f"{item['number']:>4}  {revisions}{changed}\n")
    return "".join(lines) or "no revisions are kept yet\n"
