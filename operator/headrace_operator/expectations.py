"""What a pass wrote and the watches have not shown yet. Pure bookkeeping; `now` is passed in.

Watches lag behind writes by milliseconds. A pass over what was true before its own writes could count one failure twice
or turn over two groups, so a deployment is not looked at again until its last writes have come back, or until none
has for `MAX_WAIT_SECONDS` (an object that someone deleted at once never comes back). On a busy machine a thousand pods
take longer than that to be shown; who stopped waiting while they come would try to make the rest of them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_WAIT_SECONDS = 5.0

Body = Mapping[str, Any]
ChildKey = tuple[str, str]  # kind, name


@dataclass
class Expectations:
    """The writes of one pass that have not been shown yet."""

    written: dict[ChildKey, int] = field(default_factory=dict)  # resourceVersion that the watch must reach
    deleted: dict[ChildKey, str] = field(default_factory=dict)  # uid that must be gone or going
    time: float = 0.0  # of the last write, or of the last look that found one of them shown

    def wrote(self, body: Body, now: float) -> None:
        """An apply returned `body`."""
        self.written[body["kind"], body["metadata"]["name"]] = int(body["metadata"]["resourceVersion"])
        self.time = now

    def removed(self, kind: str, name: str, uid: str, now: float) -> None:
        """A delete of this object was accepted."""
        self.deleted[kind, name] = uid
        self.time = now

    def are_met(self, children: Mapping[ChildKey, Body], now: float) -> bool:
        """Whether there is nothing left to wait for, given what the watches show (`children`, by kind and name)."""
        num_before = len(self.written) + len(self.deleted)
        self.written = {
            k: version for k, version in self.written.items() if not self._is_written(children.get(k), version)
        }
        self.deleted = {k: uid for k, uid in self.deleted.items() if not self._is_deleted(children.get(k), uid)}
        num_left = len(self.written) + len(self.deleted)
        if num_left < num_before:
            self.time = now
        return num_left == 0 or now >= self.time + MAX_WAIT_SECONDS

    @staticmethod
    def _is_written(body: Body | None, version: int) -> bool:
        return body is not None and int(body["metadata"]["resourceVersion"]) >= version

    @staticmethod
    def _is_deleted(body: Body | None, uid: str) -> bool:
        return body is None or body["metadata"]["uid"] != uid or body["metadata"].get("deletionTimestamp") is not None
