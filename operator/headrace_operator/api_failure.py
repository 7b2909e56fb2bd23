"""The part of the resource that says what becomes of groups that fail."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from headrace_operator.groups import RestartRules
from headrace_operator.rules import Rule, RuledModel


class Backoff(RuledModel):
    """How long to wait before a failed group is made again: base, 2 base, 4 base, ... and never more than max."""

    base: int = Field(default=1, ge=1, le=86400, description="Seconds after the first failure in a row. Default: 1.")
    max: int = Field(default=300, ge=1, le=86400, description="Seconds at the most. Default: 300.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.base <= self.max",
            message="backoffSeconds.base may not be more than backoffSeconds.max",
            holds=lambda b: b.base <= b.max,
        ),
    )


class RestartPolicy(RuledModel):
    """Groups restart as a whole: all pods of a group that lost one are made again together."""

    max_restarts: int = Field(
        default=5,
        ge=0,
        le=1000,
        description="Restarts in a row of one group; when it fails once more it is given up, and the condition Ready "
        "says why. Ten minutes of being ready start the count anew. Default: 5.",
    )
    backoff_seconds: Backoff = Field(
        default=Backoff(), description="Waits before restarts, each up to a fifth shorter by chance. Default: 1 to 300."
    )
    node_loss_seconds: int = Field(
        default=60,
        ge=0,
        le=86400,
        description="Seconds that a node may be silent (NotReady) before groups with a pod on it are made again "
        "elsewhere, which counts as no failure. New pods leave such a node by a toleration of as many seconds, those "
        "of the router too. Default: 60.",
    )

    def as_rules(self, seed: str) -> RestartRules:
        """The same for the planner; `seed` tells deployments apart."""
        return RestartRules(self.max_restarts, self.backoff_seconds.base, self.backoff_seconds.max, seed)
