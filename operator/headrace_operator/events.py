"""Events about a deployment: how they look, and which are worth posting. Pure; `now` is passed in.

An event says something new. A pass that fails is tried again and decides the same again, so what was just said is not
said once more; and hundreds of pods that change together are one piece of news.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from headrace_operator import names
from headrace_operator.plans import Note
from headrace_operator.times import timestamp

REPEAT_SECONDS = 600.0
MAX_NOTES_OF_A_REASON = 10
_MAX_REMEMBERED = 256
_MAX_MESSAGE = 1024

Body = dict[str, Any]


class RecentNotes:
    """What was said about one deployment in the last `REPEAT_SECONDS`."""

    def __init__(self) -> None:
        self._times: dict[Note, float] = {}  # oldest first

    def news(self, notes: Iterable[Note], now: float) -> list[Note]:
        """Those of `notes` that were not said lately; they count as said from now on."""
        fresh = []
        for note in notes:
            if now - self._times.get(note, float("-inf")) < REPEAT_SECONDS:
                continue
            self._times.pop(note, None)
            self._times[note] = now
            fresh.append(note)
        while len(self._times) > _MAX_REMEMBERED:
            del self._times[next(iter(self._times))]
        return fresh


def summarized(notes: Iterable[Note]) -> list[Note]:
    """At most `MAX_NOTES_OF_A_REASON` notes of each reason; the last one says how many there were beyond."""
    notes = list(notes)
    totals = Counter(note.reason for note in notes)
    seen: Counter[str] = Counter()
    result = []
    for note in notes:
        seen[note.reason] += 1
        more = totals[note.reason] - MAX_NOTES_OF_A_REASON
        if seen[note.reason] == MAX_NOTES_OF_A_REASON and more > 0:
            note = Note(note.reason, f"{note.message} (and {more} more)", note.is_warning)
        if seen[note.reason] <= MAX_NOTES_OF_A_REASON:
            result.append(note)
    return result


def event_body(raw: Mapping[str, Any], note: Note, now: float) -> Body:
    """A core/v1 Event about the deployment."""
    metadata = raw["metadata"]
    seed = f"{metadata['uid']}{note.reason}{note.message}{now}".encode()
    when = timestamp(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{metadata['name']}.{hashlib.sha256(seed).hexdigest()[:16]}",
            "namespace": metadata["namespace"],
        },
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
        "type": "Warning" if note.is_warning else "Normal",
        "reason": note.reason,
        "message": note.message[:_MAX_MESSAGE],
        "source": {"component": names.MANAGER},
        "firstTimestamp": f"{when[:19]}Z",
        "lastTimestamp": f"{when[:19]}Z",
        "count": 1,
    }
