"""Kubernetes quantities as exact numbers. Pure."""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation
from typing import Any

_SUFFIXES = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "k": Decimal("1e3"), "M": Decimal("1e6"),
    "G": Decimal("1e9"), "T": Decimal("1e12"), "P": Decimal("1e15"), "E": Decimal("1e18"), "Ki": Decimal(2**10),
    "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40), "Pi": Decimal(2**50), "Ei": Decimal(2**60),
}  # fmt: skip
_LONGEST_FIRST = sorted(_SUFFIXES, key=len, reverse=True)


def quantity(value: Any) -> Decimal:
    """The number that a quantity such as 2, 500m or 16Gi stands for. Raises ValueError if it is none."""
    text = str(value)
    factor = Decimal(1)
    for suffix in _LONGEST_FIRST:
        if text.endswith(suffix):
            text, factor = text.removesuffix(suffix), _SUFFIXES[suffix]
            break
    try:
        number = Decimal(text) * factor
    except InvalidOperation as error:
        raise ValueError(f"{value!r} is not a Kubernetes quantity") from error
    if not number.is_finite():
        raise ValueError(f"{value!r} is not a Kubernetes quantity")
    return number


def thousandths(value: Any) -> int:
    """The quantity in thousandths, rounded up as the scheduler does: integers add up without error.

    Raises ValueError if it is no quantity."""
    return math.ceil(quantity(value) * 1000)
