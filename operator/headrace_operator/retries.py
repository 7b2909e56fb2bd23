"""How long a watch waits before it is tried again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

MAX_PAUSE_SECONDS = 4.0


def watch_pauses() -> Iterator[float]:
    """Seconds, without end, and never long: the API server may be back at any moment."""
    return itertools.chain((0.5, 1.0, 2.0), itertools.repeat(MAX_PAUSE_SECONDS))
