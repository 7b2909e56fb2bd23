"""`headrace retry`: failed groups that someone wants made again at once. Pure.

The wish is an annotation on the resource that names each group with the time of the failure that it is about,
`decode/0@2026-01-01T00:00:00.000000Z`. It speaks of that failure and of earlier ones only: a wish that has been
fulfilled does nothing more, so that nobody has to take it away, and no two clocks are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from headrace_operator.api_status import Rebuild, Status
from headrace_operator.times import epoch_seconds

_WISH = re.compile(r"(?P<role>[a-z]+)/(?P<group>\d{1,4})@(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z)")

Wishes = Mapping[tuple[str, int], str]  # time of a failure by (role, group)


def wishes(annotation: str) -> dict[tuple[str, int], str]:
    """What an annotation asks for; words that are no wish are nothing to act on."""
    found = {}
    for word in annotation.split():
        match = _WISH.fullmatch(word)
        if match:
            found[match["role"], int(match["group"])] = match["time"]
    return found


def is_wanted(rebuild: Rebuild, wanted: Wishes) -> bool:
    """Whether this failure is one that someone wants forgotten."""
    time = wanted.get((rebuild.role, rebuild.group))
    return time is not None and rebuild.failures > 0 and epoch_seconds(rebuild.last_time) <= epoch_seconds(time)


def failed(status: Status, role: str | None, group: int | None) -> list[Rebuild]:
    """Groups that failed and have not been well since, of one role or one index if these are given."""
    return [
        rebuild
        for rebuild in status.rebuilds
        if rebuild.failures > 0 and role in (None, rebuild.role) and group in (None, rebuild.group)
    ]


def annotation_for(before: str, status: Status, chosen: Iterable[Rebuild]) -> str:
    """The annotation that asks for `chosen`, and still for what was asked before and is not done yet."""
    asked = wishes(before)
    wanted = {(r.role, r.group): asked[r.role, r.group] for r in status.rebuilds if is_wanted(r, asked)}
    wanted |= {(r.role, r.group): r.last_time for r in chosen}
    return " ".join(f"{role}/{group}@{time}" for (role, group), time in sorted(wanted.items()))
