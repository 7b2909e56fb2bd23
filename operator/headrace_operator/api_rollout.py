"""The part of the resource that says how running groups are replaced."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from headrace_operator.rules import Rule, RuledModel


class RolloutStrategy(RuledModel):
    """How groups of an old revision are replaced by groups of the wanted one; for each role by itself."""

    max_surge: int = Field(
        default=0,
        ge=0,
        le=100,
        description="Groups that a role may have beyond its replicas during a roll-out, those on their way out "
        "included; each needs room of its own. Default: 0.",
    )
    max_unavailable: int = Field(
        default=1,
        ge=0,
        le=100,
        description="Groups of a role that a roll-out may leave unavailable at a time. Default: 1, which needs no room "
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
            cel="self.maxSurge > 0 || self.maxUnavailable > 0",
            message="maxSurge and maxUnavailable cannot both be 0: no group could ever be replaced",
            holds=lambda s: s.max_surge > 0 or s.max_unavailable > 0,
        ),
    )
