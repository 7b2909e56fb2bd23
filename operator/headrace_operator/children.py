"""What becomes of a deployment's children: which are applied, and which are not wanted any more. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace_operator.drift import WRITTEN_ONCE, has_drifted, is_as_rendered, metadata_repair
from headrace_operator.history import to_keep
from headrace_operator.observe import Observed
from headrace_operator.plans import Note

Body = dict[str, Any]

# The API server keeps the data of stored revisions as the bytes that were sent, and would take any later patch, which
# orders keys as an apply does, for a change of what may not change.
_APPLIED = ("ControllerRevision",)


@dataclass(frozen=True)
class Application:
    """Create or apply `body`. `is_new`: no child of that name is known, so the name must be free or ours."""

    body: Body
    is_new: bool

    @property
    def is_creation(self) -> bool:
        """Whether to create it, not to apply it."""
        return self.is_new and self.body["kind"] not in _APPLIED

    @property
    def is_metadata_only(self) -> bool:
        """Labels and annotations of an object whose other fields are fixed."""
        return not self.is_new and self.is_written_once

    @property
    def is_written_once(self) -> bool:
        return self.body["kind"] in WRITTEN_ONCE


@dataclass(frozen=True)
class ChildDeletion:
    """Delete one child that is not a pod of a group."""

    kind: str
    name: str
    uid: str


def applications_of(wanted: list[Body], observed: Observed) -> tuple[list[Application], list[Note]]:
    applications, notes = [], []
    for body in wanted:
        key = (body["kind"], body["metadata"]["name"])
        if key in observed.strangers:
            continue
        live = observed.children.get(key)
        if live is None:
            applications.append(Application(body, is_new=True))
        elif live["metadata"].get("deletionTimestamp") is None and has_drifted(live, body):
            repair = metadata_repair(live, body) if body["kind"] in WRITTEN_ONCE else body
            applications.append(Application(repair, is_new=False))
            if live.get("revision") != body.get("revision"):
                continue  # wanted once more: no one has touched it
            how = "was edited and is brought back" if is_as_rendered(live, body) else "is brought up to date"
            notes.append(Note("ChildApplied", f"{key[0]} {key[1]} {how}"))
    return applications, notes


def unwanted(observed: Observed, desired: Mapping[tuple[str, str], Body], roles: Iterable[str]) -> list[ChildDeletion]:
    """Children that nothing wants any more, but for the history of `roles`. Pods of groups are the plans' business."""
    stored = [body for (kind, _), body in sorted(observed.children.items()) if kind == "ControllerRevision"]
    needed = {*desired, *(("ControllerRevision", name) for name in to_keep(stored, roles))}
    return [
        ChildDeletion(kind, name, body["metadata"]["uid"])
        for (kind, name), body in sorted(observed.children.items())
        if kind != "Pod" and (kind, name) not in needed and body["metadata"].get("deletionTimestamp") is None
    ]
