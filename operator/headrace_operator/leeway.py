"""How far a roll-out may go beyond and below the groups of one role: whole numbers, or percent of its replicas. Pure.

Rounded as a Deployment rounds: surge up, unavailable down; and if both come to zero one group may be unavailable, since
otherwise none could ever be replaced.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Percent:
    """A share of a role's replicas."""

    value: int

    def __str__(self) -> str:
        return f"{self.value}%"


Amount = int | Percent


@dataclass(frozen=True)
class Leeway:
    """Groups of one role."""

    max_surge: int  # beyond its replicas
    max_unavailable: int  # slots without an available group that a roll-out may cause


def amount_of(written: int | str) -> Amount:
    """A number of groups as the resource has it, such as 2 or "25%"."""
    return Percent(int(written.removesuffix("%"))) if isinstance(written, str) else written


def leeway(max_surge: Amount, max_unavailable: Amount, replicas: int) -> Leeway:
    """What the two come to for a role of `replicas` groups."""
    surge = -(-max_surge.value * replicas // 100) if isinstance(max_surge, Percent) else max_surge
    unavailable = max_unavailable.value * replicas // 100 if isinstance(max_unavailable, Percent) else max_unavailable
    return Leeway(surge, unavailable if surge or unavailable else 1)
