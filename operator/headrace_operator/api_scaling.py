"""How many groups there are: fixed in the spec, set from outside through one DisaggRoleScaler per role, or by the
operator itself.

`spec.scaling` of a DisaggDeployment, and the DisaggRoleScaler itself: the object that a HorizontalPodAutoscaler, KEDA
or `kubectl scale` writes to. Both are sources of the CRDs, as `api.py` says.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from headrace_operator import names
from headrace_operator.api_autoscale import AutoScaling
from headrace_operator.api_status import StatusModel
from headrace_operator.rules import Rule, RuledModel

STATIC = "Static"
EXTERNAL = "External"
AUTO = "Auto"


class RatioBound(RuledModel):
    """A ratio of prefill to decode groups, in whole groups."""

    prefill: int = Field(ge=1, le=names.MAX_GROUPS, description="Prefill groups.")
    decode: int = Field(ge=1, le=names.MAX_GROUPS, description="Decode groups.")

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"


class Ratio(RuledModel):
    """Bounds of prefill groups to decode groups."""

    min: RatioBound | None = Field(
        default=None,
        description="Fewest prefill groups for so many decode groups: where there are fewer, decode is cut. "
        "Default: no bound.",
    )
    max: RatioBound | None = Field(
        default=None,
        description="Most prefill groups for so many decode groups: where there are more, prefill is cut. "
        "Default: no bound.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.min) || !has(self.max) || self.min.prefill * self.max.decode <= "
            "self.max.prefill * self.min.decode",
            message="scaling.ratio.min may not be over scaling.ratio.max",
            holds=lambda r: (
                r.min is None or r.max is None or r.min.prefill * r.max.decode <= r.max.prefill * r.min.decode
            ),
        ),
    )


class Scaling(RuledModel):
    """Who says how many groups a role has."""

    mode: Literal["Static", "External", "Auto"] = Field(
        default="Static",
        description="Static: roles[].replicas. External: the DisaggRoleScaler NAME-ROLE of each role, which the "
        "operator makes with the present count (roles[].replicas of a new deployment; at least 1, since autoscalers "
        "leave alone what is at 0) and never writes to again. Auto: the operator, as `auto` says, from the present "
        "counts on (roles[].replicas of a new deployment). Default: Static.",
    )
    auto: AutoScaling | None = Field(
        default=None, description="What mode Auto may do, and what it is to reach. Default: none."
    )
    ratio: Ratio | None = Field(
        default=None, description="Bounds that External counts are cut to; never below one group. Default: none."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.ratio) || self.mode == 'External'",
            message="scaling.ratio needs scaling.mode External",
            holds=lambda s: s.ratio is None or s.mode == EXTERNAL,
        ),
        Rule(
            cel="has(self.auto) == (self.mode == 'Auto')",
            message="scaling.auto belongs to scaling.mode Auto: set both or none",
            holds=lambda s: (s.auto is not None) == (s.mode == AUTO),
        ),
    )


class ScalerSpec(RuledModel):
    """What is wanted. Written by people and autoscalers."""

    replicas: int = Field(ge=0, le=names.MAX_GROUPS, description="Groups of the role; one group is one engine.")


class ScalerStatus(StatusModel):
    """What is. Written by the operator."""

    replicas: int = Field(description="Groups of the role that have pods.")
    selector: str = Field(
        max_length=1024, description="Label selector of the groups' leaders: autoscalers count and measure those pods."
    )


class DisaggRoleScaler(RuledModel):
    """The number of groups of one role of a DisaggDeployment whose scaling.mode is External. Made by the operator."""

    spec: ScalerSpec
