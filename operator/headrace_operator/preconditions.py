"""What must hold before the operator can work: its kinds are served, and it may look at whatever it is to serve.

A right that is missing shows here, at the door. A watch that is refused would be tried again for ever, and the
namespace look empty.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence

from headrace_operator import names
from headrace_operator.cluster import Cluster, ClusterError, Refused
from headrace_operator.kinds import CHILD_KINDS, RESOURCES

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0
_MAX_LISTED = 3

Namespaces = Sequence[str] | None  # None: all of them


async def wait_until_usable(cluster: Cluster, namespaces: Namespaces, stop: asyncio.Event) -> bool:
    """Wait until the API server answers and knows our resources; False if told to stop first.

    Raises Refused, with what is missing, where the operator may not list what it is to watch."""
    told = ""
    while not stop.is_set():
        try:
            missing = await _missing_kinds(cluster, namespaces)
            if not missing:
                return True
            reason = f"these CustomResourceDefinitions to be installed (folder crds): {', '.join(missing)}"
        except Refused:
            raise
        except ClusterError as error:
            reason = f"the API server: {error}"
        if reason != told:
            logger.warning("waiting for %s", reason)
            told = reason
        try:
            await asyncio.wait_for(stop.wait(), POLL_SECONDS)
        except TimeoutError:
            continue
    return False


async def _missing_kinds(cluster: Cluster, namespaces: Namespaces) -> list[str]:
    """What the API server does not know (yet). Raises Refused if a kind may not be listed in a namespace."""
    places = [(kind, space) for space in namespaces or (None,) for kind in (names.KIND, *CHILD_KINDS)]
    answers = await asyncio.gather(*(cluster.is_served(*place) for place in places), return_exceptions=True)
    missing: dict[str, None] = {}
    refused: dict[str, str | None] = {}
    for (kind, space), answer in zip(places, answers, strict=True):
        if isinstance(answer, Refused):
            refused[str(answer)] = space
        elif isinstance(answer, BaseException):
            raise answer
        elif not answer:
            group, _, plural = RESOURCES[kind]
            missing[f"{plural}.{group}"] = None
    if refused:
        more = f" (and {len(refused) - _MAX_LISTED} more)" if len(refused) > _MAX_LISTED else ""
        text = "; ".join(list(refused)[:_MAX_LISTED])
        raise Refused(f"rights are missing: {text}{more}. To do: {_what_to_do({*refused.values()} - {None})}")
    return list(missing)


def _what_to_do(spaces: Collection[str | None]) -> str:
    if not spaces:
        return "install the chart without watchNamespaces, which grants them, or name the namespaces to serve"
    listed = ", ".join(sorted(filter(None, spaces)))
    return f"list {listed} in watchNamespaces of the chart, which grants them, or do not name it with --namespace"
