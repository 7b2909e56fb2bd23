"""How long something takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def seconds_of(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
