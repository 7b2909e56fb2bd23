"""The part of the resource that says how running groups are replaced."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from headrace_operator.rules import Rule, RuledModel

_PERCENT = "^(100|[1-9]?[0-9])%$"
_MAX_AMOUNT = 100


def _check_amount(value: int | str) -> int | str:
    if isinstance(value, str) and not re.match(_PERCENT, value):
        raise ValueError(f"{value!r} is neither a number nor a percentage from 0% to 100%")
    if isinstance(value, int) and not 0 <= value <= _MAX_AMOUNT:
        raise ValueError(f"{value} is not from 0 to {_MAX_AMOUNT}")
    return value


# A number of groups, or a percentage of a role's replicas.
GroupAmount = Annotated[
    int | str,
    AfterValidator(_check_amount),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "pattern": _PERCENT,
            "maxLength": 4,
            "minimum": 0,
            "maximum": _MAX_AMOUNT,
        }
    ),
]


class RolloutStrategy(RuledModel):
    """How groups of an old revision are replaced by groups of the wanted one; for each role by itself."""

    max_surge: GroupAmount = Field(
        default=0,
        description="Groups that a role may have beyond its replicas during a roll-out, those on their way out "
        "included; each needs room of its own. A number, or a percentage of the role's replicas, rounded up. "
        "Default: 0.",
    )
    max_unavailable: GroupAmount = Field(
        default=1,
        description="Groups of a role that a roll-out may leave unavailable at a time. A number, or a percentage of "
        "the role's replicas, rounded down, but to 1 where maxSurge comes to 0. Default: 1, which needs no room "
        "beyond the role's own, and interrupts a role of one group.",
    )
    when_full: Literal["Wait", "Recreate"] = Field(
        default="Wait",
        description="What to do if maxUnavailable is 0 and there is no room for maxSurge. Wait: change nothing, and "
        "say what is missing. Recreate: replace one group at a time in its place, as if maxUnavailable were 1. "
        "Default: Wait.",
    )
    min_ready_seconds: int = Field(
        default=0,
        ge=0,
        le=86400,
        description="Seconds that a new group must have been ready before it counts as available. Default: 0.",
    )
    partition: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="Groups of each role that stay at their old revision: a canary is all but one. Default: 0.",
    )
    progress_deadline_seconds: int = Field(
        default=7200,
        ge=1,
        le=604800,
        description="Seconds without any progress after which the condition Progressing becomes False with the reason "
        "ProgressDeadlineExceeded; nothing is undone, and work goes on. Default: 7200.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!(string(self.maxSurge) in ['0', '0%'] && string(self.maxUnavailable) in ['0', '0%'])",
            message="maxSurge and maxUnavailable cannot both be 0: no group could ever be replaced",
            holds=lambda s: not {s.max_surge, s.max_unavailable} <= {0, "0%"},
        ),
    )
