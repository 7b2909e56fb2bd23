"""Auto scaling of one deployment: from the resource, what its engines said and its status, to counts of groups. Pure.

`balance.py` decides; here is what it reads, what is remembered in the status, and what is said. The status is written
only when the verdict changes, and its numbers once a minute at most while they do: a quiet deployment costs no write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headrace_operator import names
from headrace_operator.api import DisaggDeployment, Role
from headrace_operator.api_autoscale import AutoScaling
from headrace_operator.api_status import AutoScalingFloor, AutoScalingStatus, Status
from headrace_operator.balance import Floor, Memory, Rules, Side, State, Verdict, balance, fitted
from headrace_operator.groups import Gate, GroupKey, GroupState, Pod, group_state
from headrace_operator.observe import Observed
from headrace_operator.plans import Note
from headrace_operator.pressure import Pressed, Wanted, pressed_decode, pressed_prefill
from headrace_operator.signals import Measured, Sample, measured
from headrace_operator.times import epoch_seconds, timestamp

REFRESH_SECONDS = 60.0
# A sample that is older than so many looks is of another time.
MAX_AGE_LOOKS = 3


@dataclass(frozen=True)
class AutoScaled:
    """Groups by role from now on, what the status is to say, and events."""

    replicas: Mapping[str, int]
    status: AutoScalingStatus | None
    pressed: Mapping[str, Pressed | None]
    notes: tuple[Note, ...] = ()


def autoscaled(deployment: DisaggDeployment, observed: Observed, before: Status, now: float) -> AutoScaled:
    """`deployment`: with scaling.auto, and in its roles the counts that hold so far."""
    auto = deployment.spec.scaling.auto
    assert auto is not None, "the rules of the resource"
    known = pressures(deployment, observed.samples or {}, serving(observed), now)
    sides = [_side(role, auto, observed, known.get(role.name)) for role in deployment.spec.roles]
    if not auto.dry_run:
        counts = fitted(sides[0], sides[1], auto.gpu_budget)
        sides = [replace(side, replicas=counts[side.name]) for side in sides]
    replicas = {side.name: side.replicas for side in sides}
    if observed.samples is None:
        return AutoScaled(replicas, before.autoscaling, known)  # nobody has been asked yet: what was said holds
    rules = Rules(auto.gpu_budget, float(auto.hold_seconds), float(auto.cooldown_seconds))
    memory = _memory(before.autoscaling)
    verdict = balance(sides[0], sides[1], rules, memory, now)
    if auto.dry_run and verdict.state is State.MOVED:
        verdict = Verdict(State.MOVED, verdict.message, replicas, memory)
    status = _status(verdict, auto.dry_run, before.autoscaling, now)
    return AutoScaled(verdict.replicas, status, known, _notes(status, verdict, before.autoscaling))


def pressures(
    deployment: DisaggDeployment, samples: Mapping[GroupKey, Sample], asked: set[GroupKey], now: float
) -> dict[str, Pressed | None]:
    """Both roles; None unless every group in service has told lately how it is."""
    auto = deployment.spec.scaling.auto
    prefill = _measured(names.PREFILL, deployment, samples, asked, now)
    decode = _measured(names.DECODE, deployment, samples, asked, now)
    if auto is None or prefill is None or decode is None:
        return {}
    targets = auto.targets
    wanted = Wanted(
        first_token_seconds=targets.first_token_milliseconds / 1000,
        inter_token_seconds=targets.inter_token_milliseconds / 1000,
        kv_use=targets.kv_use_percent / 100,
        requests_per_rank=float(targets.requests_per_rank or deployment.spec.engine.max_sequences),
    )
    return {names.PREFILL: pressed_prefill(prefill, decode, wanted), names.DECODE: pressed_decode(decode, wanted)}


def serving(observed: Observed) -> set[GroupKey]:
    """Groups that take requests, and so can be asked."""
    return {key for key, pods in observed.groups.items() if _serves(pods)}


def _serves(pods: Sequence[Pod]) -> bool:
    leader = pods[0]
    is_whole = all(pod.is_ready and not pod.is_terminating for pod in pods)
    return is_whole and leader.index == 0 and bool(leader.address) and leader.gate in (Gate.OPEN, Gate.NONE)


def _measured(
    role: str, deployment: DisaggDeployment, samples: Mapping[GroupKey, Sample], asked: set[GroupKey], now: float
) -> Measured | None:
    auto = deployment.spec.scaling.auto
    max_age = MAX_AGE_LOOKS * auto.interval_seconds if auto else 0.0
    own = [key for key in asked if key.role == role]
    fresh = [samples[key] for key in own if key in samples and now - samples[key].time <= max_age]
    return measured(fresh) if len(fresh) == len(own) else None


def _side(role: Role, auto: AutoScaling, observed: Observed, known: Pressed | None) -> Side:
    groups = [pods for key, pods in observed.groups.items() if key.role == role.name]
    bounds = auto.bounds(role.name)
    return Side(
        name=role.name,
        replicas=role.replicas,
        num_groups=len(groups),
        num_ready=sum(group_state(pods, role.parallelism.num_pods) is GroupState.READY for pods in groups),
        min_replicas=bounds.min_replicas,
        max_replicas=bounds.max_replicas or names.MAX_GROUPS,
        gpus=role.parallelism.data,
        pressed=known,
    )


def _memory(stored: AutoScalingStatus | None) -> Memory:
    if stored is None:
        return Memory()
    return Memory(
        short=stored.short_role or "",
        since=epoch_seconds(stored.short_since) if stored.short_since else 0.0,
        seen=epoch_seconds(stored.short_seen) if stored.short_seen else 0.0,
        moved_at=epoch_seconds(stored.last_move) if stored.last_move else None,
        moved_to=stored.last_move_to or "",
        moved_why=stored.last_move_message or "",
        num_reversals=stored.num_moves_back,
        num_got=stored.last_move_got,
        num_given=stored.last_move_given,
        pressure=stored.last_move_pressure_percent / 100,
        floors=tuple(Floor(floor.role, floor.replicas, epoch_seconds(floor.until)) for floor in stored.floors),
    )


def _status(verdict: Verdict, dry_run: bool, before: AutoScalingStatus | None, now: float) -> AutoScalingStatus:
    memory = verdict.memory
    status = AutoScalingStatus(
        state=names.REASON_WOULD_MOVE if dry_run and verdict.state is State.MOVED else verdict.state.value,
        message=verdict.message,
        last_time=timestamp(now),
        short_role=memory.short or None,
        short_since=timestamp(memory.since) if memory.short else None,
        short_seen=timestamp(memory.seen) if memory.short else None,
        last_move=None if memory.moved_at is None else timestamp(memory.moved_at),
        last_move_to=memory.moved_to or None,
        last_move_message=memory.moved_why or None,
        num_moves_back=memory.num_reversals,
        last_move_got=memory.num_got,
        last_move_given=memory.num_given,
        last_move_pressure_percent=round(min(memory.pressure, 1e6) * 100),
        floors=[
            AutoScalingFloor(role=floor.role, replicas=floor.replicas, until=timestamp(floor.until))
            for floor in memory.floors
        ],
    )
    if before is None:
        return status
    is_same = status.model_copy(update={"message": before.message, "last_time": before.last_time}) == before
    is_recent = now - epoch_seconds(before.last_time) < REFRESH_SECONDS
    return before if is_same and (is_recent or status.message == before.message) else status


def _notes(status: AutoScalingStatus, verdict: Verdict, before: AutoScalingStatus | None) -> tuple[Note, ...]:
    """An event for each move, and when an advice or a want begins."""
    is_new = before is None or before.state != status.state
    if status.state == names.REASON_WOULD_MOVE:
        return (Note(names.EVENT_ADVISED, verdict.message),) if is_new else ()
    if verdict.state is State.MOVED:
        return (Note(names.EVENT_REBALANCED, verdict.message),)
    if verdict.state is State.LIMITED and is_new:
        return (Note(names.SCALING_LIMITED, verdict.message, is_warning=True),)
    return ()
