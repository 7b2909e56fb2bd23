"""Which specs a deployment had, from the ControllerRevisions that are kept of its roles, and how to go back. Pure.

A ControllerRevision holds one role's template and the number of the generation that wanted it last. The roles of a spec
share their model, engine and transfer settings, so a step of history is what all roles had together.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace_operator import names

Body = Mapping[str, Any]

HISTORY_LIMIT = 10  # revisions of a role that are kept when no group needs them
_SHARED = ("model", "engine", "transfer", "drainTimeoutSeconds")
_OF_A_ROLE = ("parallelism", "resources", "template")


class CannotUndo(ValueError):
    """There is nothing to go back to; the text says why."""


@dataclass(frozen=True)
class Entry:
    """What all roles had from generation `number` on, until the next entry."""

    number: int
    revisions: Mapping[str, str]  # by role
    templates: Mapping[str, Body]  # by role, as written


def to_keep(revisions: Iterable[Body], roles: Iterable[str]) -> set[str]:
    """Names of the ControllerRevisions that history keeps: the latest of every role that is wanted."""
    kept: set[str] = set()
    for role in roles:
        own = [body for body in revisions if _place(body)[0] == role]
        own.sort(key=lambda body: (int(body["revision"]), body["metadata"]["name"]))
        kept |= {body["metadata"]["name"] for body in own[-HISTORY_LIMIT:]}
    return kept


def number_of(stored: Body | None, others: Iterable[Body], is_wanted: bool, generation: int) -> int:
    """The number of a revision: a wanted one is the latest of its role, also when it was wanted before."""
    if stored is None:
        return generation
    number = int(stored["revision"])
    is_latest = all(int(other["revision"]) <= number for other in others)
    return number if is_latest or not is_wanted else max(generation, number)


def entries(revisions: Iterable[Body], roles: Iterable[str]) -> list[Entry]:
    """All steps, the oldest first; steps from before a role was there are left out."""
    wanted = list(roles)
    by_role: dict[str, list[Body]] = {role: [] for role in wanted}
    for body in sorted(revisions, key=lambda body: int(body["revision"])):
        by_role.get(_place(body)[0], []).append(body)
    found = []
    for number in sorted({int(body["revision"]) for bodies in by_role.values() for body in bodies}):
        latest = {role: [b for b in bodies if int(b["revision"]) <= number][-1:] for role, bodies in by_role.items()}
        if all(latest.values()):
            found.append(
                Entry(
                    number,
                    {role: _place(bodies[0])[1] for role, bodies in latest.items()},
                    {role: bodies[0].get("data") or {} for role, bodies in latest.items()},
                )
            )
    return found


def changed_fields(before: Entry | None, after: Entry) -> list[str]:
    """Dotted paths of what an entry changed, those of a role with its name before them."""
    if before is None:
        return []
    found: set[str] = set()
    for role, template in after.templates.items():
        for path in _differences(before.templates.get(role, {}), template, ""):
            is_shared = path.split(".")[0] in _SHARED
            found.add(path if is_shared else f"{role}.{path}")
    return sorted(found)


def chosen(found: list[Entry], number: int | None) -> Entry:
    """The entry to go back to: the one before the last, or the one with this number. Raises CannotUndo."""
    if number is None:
        if len(found) < 2:
            raise CannotUndo("there is no earlier revision")
        return found[-2]
    entry = next((entry for entry in found if entry.number == number), None)
    if entry is None:
        raise CannotUndo(f"there is no revision {number}; there are {', '.join(str(e.number) for e in found)}")
    return entry


def restored(body: Body, entry: Entry) -> dict[str, Any]:
    """The resource with an entry's templates; numbers of groups and everything else stay. Raises CannotUndo."""
    result: dict[str, Any] = copy.deepcopy(dict(body))
    spec = result["spec"]
    shared = [{key: _written(template).get(key) for key in _SHARED} for template in entry.templates.values()]
    if any(each != shared[0] for each in shared):
        raise CannotUndo(f"the roles of revision {entry.number} differ in what a spec says once for all of them")
    _put(spec, shared[0])
    for role in spec["roles"]:
        _put(role, {key: entry.templates[role["name"]].get(key) for key in _OF_A_ROLE})
    return result


def _written(template: Body) -> dict[str, Any]:
    """A stored template as the user wrote it: without the image that was filled in."""
    engine = dict(template.get("engine") or {})
    if template.get("isDefaultImage"):
        engine.pop("image", None)
    return {**template, "engine": engine or None}


def _put(target: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if value is None:
            target.pop(key, None)
        else:
            target[key] = copy.deepcopy(value)


def _differences(before: Any, after: Any, path: str) -> list[str]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        return [
            difference
            for key in sorted({*before, *after})
            for difference in _differences(before.get(key), after.get(key), f"{path}.{key}".lstrip("."))
        ]
    return [] if before == after else [path]


def _place(body: Body) -> tuple[str, str]:
    """(role, revision) of a ControllerRevision."""
    return names.place_of_revision(body["metadata"]["name"])
