"""`headrace rollout history` and `headrace rollout undo`: earlier specs of a deployment, all roles together."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

from headrace_operator import names

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
        parser.add_argument("name")
        parser.add_argument("-n", "--namespace", default="default", help="default: %(default)s")
        parser.set_defaults(run=run)


def _history(args: argparse.Namespace) -> int:
    return _with_cluster(args, _print_history)


def _undo(args: argparse.Namespace) -> int:
    return _with_cluster(args, _go_back)


def _with_cluster(args: argparse.Namespace, work: Any) -> int:
    from headrace_operator.cluster import ClusterError, connect
    from headrace_operator.history import CannotUndo, entries
    from headrace_operator.observe import controller_uid

    async def run() -> int:
        async with connect() as cluster:
            body = await cluster.get(names.KIND, args.namespace, args.name)
            if body is None:
                print(f"headrace: there is no {names.KIND} {args.name} in namespace {args.namespace}", file=sys.stderr)
                return 1
            stored = await cluster.list_children("ControllerRevision", args.namespace, args.name)
            own = [each for each in stored if controller_uid(each) == body["metadata"]["uid"]]
            found = entries(own, [role["name"] for role in body["spec"]["roles"]])
            return int(await work(args, cluster, body, found))

    try:
        return asyncio.run(run())
    except (ClusterError, CannotUndo, OSError) as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 1


async def _print_history(args: argparse.Namespace, cluster: Any, body: dict[str, Any], found: list[Any]) -> int:
    if args.output == "json":
        print(json.dumps(history_data(found), indent=2))
    else:
        print(history_table(found), end="")
    return 0


async def _go_back(args: argparse.Namespace, cluster: Any, body: dict[str, Any], found: list[Any]) -> int:
    from headrace_operator.history import chosen, restored

    entry = chosen(found, args.to)
    wanted = restored({**body, "apiVersion": names.API_VERSION, "kind": names.KIND}, entry)
    if wanted["spec"] == body["spec"]:
        print(f"the spec is that of revision {entry.number} already: nothing to do")
        return 0
    await cluster.replace(wanted)
    print(f"{args.name} goes back to revision {entry.number}")
    return 0


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
