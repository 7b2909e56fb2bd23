"""Whether a change still advances: what was reached at best, when, and how long nothing has been reached since. Pure.

Counts of pods go up and down while a group crashes again and again, so only a new best counts: more ready groups of the
wanted revisions, or fewer groups in the way, than ever before under this spec.
"""

from __future__ import annotations

from headrace_operator.api_status import Progress
from headrace_operator.decide import Decision
from headrace_operator.groups import GroupState
from headrace_operator.times import epoch_seconds


def progress_of(before: Progress | None, decision: Decision, generation: int, now: str) -> Progress:
    """What to note while something is to be changed. `now` as Kubernetes writes times."""
    num_ready, num_old = _counts(decision)
    if before is None or before.generation != generation:
        return Progress(generation=generation, num_ready=num_ready, num_old=num_old, last_time=now)
    if num_ready <= before.num_ready and num_old >= before.num_old:
        return before
    return Progress(
        generation=generation,
        num_ready=max(num_ready, before.num_ready),
        num_old=min(num_old, before.num_old),
        last_time=now,
    )


def seconds_left(progress: Progress | None, deadline_seconds: float, now: float) -> float | None:
    """Seconds until the change counts as stuck, 0 if it does; None while there is none."""
    if progress is None:
        return None
    return max(0.0, epoch_seconds(progress.last_time) + deadline_seconds - now)


def _counts(decision: Decision) -> tuple[int, int]:
    """(ready groups of wanted revisions, groups of old revisions or on their way out)."""
    num_ready = num_old = 0
    for role, plan in decision.plans.items():
        wanted = decision.revisions.get(role)
        for slot in plan.slots:
            num_ready += any(g.revision == wanted and g.state is GroupState.READY for g in slot.groups)
            num_old += slot.holder.revision != wanted
        num_old += len(plan.leaving)
    return num_ready, num_old
