"""Times as Kubernetes writes them. Pure."""

from __future__ import annotations

from datetime import UTC, datetime


def epoch_seconds(timestamp: str) -> float:
    """Seconds since 1970 of a Kubernetes time."""
    return datetime.fromisoformat(timestamp).timestamp()


def timestamp(seconds: float) -> str:
    """Epoch seconds as Kubernetes writes times, to the microsecond."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
