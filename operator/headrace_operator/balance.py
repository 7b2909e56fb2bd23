"""Whether groups are to move between prefill and decode, and how many. Pure: plain data and `now` in, a verdict out.

1. Counts are brought within their bounds and the budget first, at once.
2. A role is *short* while its pressure is over 1. The shorter one gets groups: from what is free of the budget, or else
   from the other role, if that keeps its targets by a margin (`RELIEF`) now and, as far as its load tells, without what
   it gives. So with one load there is never a move and a move back: a role that gave would have to be short, which its
   load would have foretold.
3. It must have been short at every look for `hold_seconds`, and the last move must be `cooldown_seconds` ago. Loads may
   be mistold, so a move back waits for twice as long, and so on up to sixteen times: the worst is bounded.
4. A load may still foretell too little (`pressure.py` says what it takes for granted). So a move that makes the giver
   more short than the other role was before is *undone* after one cool-down, whatever the other role would like, and
   the giver does not give below that count again while the move is remembered.
5. As many groups move as the load asks for, at most as many as the role has. What a larger donor group leaves over is
   filled as well.
6. Nothing moves while anything of a role is not known, or while a role has not all of its groups ready.

What outlives a look is the `Memory`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from headrace_operator.pressure import Pressed

RELIEF = 0.8  # of its targets, that a role which gives may come to
AIM = 0.8  # of its load, that a role which gets is to come to
MAX_BACKOFF = 16
# From the last move on for so many cool-downs, a move the other way counts as a move back.
REMEMBERED_COOLDOWNS = 32
# A need that nobody has confirmed for longer begins anew; one that is confirmed is noted no more often than that.
MAX_GAP_SECONDS = 120.0
CONFIRM_SECONDS = 30.0


@dataclass(frozen=True)
class Side:
    """One of the two roles. `pressed`: None while it is not known."""

    name: str
    replicas: int  # groups that it is to have
    num_groups: int  # groups that it has, those on their way out included
    num_ready: int
    min_replicas: int
    max_replicas: int
    gpus: int  # of one group
    pressed: Pressed | None

    @property
    def is_settled(self) -> bool:
        return self.num_groups == self.num_ready == self.replicas


@dataclass(frozen=True)
class Rules:
    """What the resource says."""

    gpu_budget: int
    hold_seconds: float
    cooldown_seconds: float


@dataclass(frozen=True)
class Floor:
    """A role was short with fewer groups: it gives none below this count for now."""

    role: str
    replicas: int
    until: float  # epoch seconds


@dataclass(frozen=True)
class Memory:
    """What must outlive a look. Times are epoch seconds."""

    short: str = ""  # the role that is short and could be helped
    since: float = 0.0
    seen: float = 0.0  # when that was last noted
    moved_at: float | None = None
    moved_to: str = ""
    moved_why: str = ""
    num_reversals: int = 0  # moves back, in a row
    num_got: int = 0  # groups, by the last move
    num_given: int = 0  # for it, by the other role
    pressure: float = 0.0  # of the role that got them, before
    floors: tuple[Floor, ...] = ()


class State(enum.StrEnum):
    """What a look came to; reasons of the status too."""

    BALANCED = "Balanced"  # no role is short
    UNKNOWN = "SignalsMissing"
    SETTLING = "Settling"  # groups are still coming or going
    HOLDING = "Holding"  # a role is short, but not for long yet
    COOLING = "CoolingDown"
    LIMITED = "NothingToGive"  # a role is short, and there is nothing that it could get
    MOVED = "Moved"


@dataclass(frozen=True)
class Verdict:
    """`replicas` by role, from now on."""

    state: State
    message: str
    replicas: Mapping[str, int]
    memory: Memory


@dataclass(frozen=True)
class Move:
    """`to` gets `num_got` groups; the other role gives `num_given` (0: the budget has room)."""

    to: Side
    num_got: int
    giver: Side
    num_given: int

    def __str__(self) -> str:
        got = f"{self.to.name} goes from {self.to.replicas} to {self.to.replicas + self.num_got} groups"
        if not self.num_given:
            return got
        return f"{got}, {self.giver.name} from {self.giver.replicas} to {self.giver.replicas - self.num_given}"


def balance(first: Side, second: Side, rules: Rules, memory: Memory, now: float) -> Verdict:
    """What to do with two roles whose counts are within their bounds (`fitted`)."""
    replicas = {side.name: side.replicas for side in (first, second)}
    memory = replace(memory, floors=tuple(floor for floor in memory.floors if floor.until > now))
    calm = replace(memory, short="", since=0.0, seen=0.0)
    unsettled = [side for side in (first, second) if not side.is_settled]
    if unsettled:
        waits = [f"{s.name} has {s.num_groups} groups, {s.num_ready} ready, of {s.replicas}" for s in unsettled]
        return Verdict(State.SETTLING, "; ".join(waits), replicas, calm)
    if first.pressed is None or second.pressed is None:
        unknown = " and ".join(side.name for side in (first, second) if side.pressed is None)
        return Verdict(State.UNKNOWN, f"not every engine of {unknown} has told how it is", replicas, memory)
    told = "; ".join(f"{side.name} is {side.pressed}" for side in (first, second))
    to, giver = sorted((first, second), key=lambda side: -side.pressed.pressure if side.pressed else 0.0)
    if to.pressed is None or to.pressed.pressure <= 1:
        return Verdict(State.BALANCED, told, replicas, calm)
    undo = _undo(to, giver, rules, memory)
    move, obstacle = (undo, "") if undo else _move(to, _floored(giver, memory), rules)
    if move is None:
        return Verdict(State.LIMITED, f"{obstacle}; {told}", replicas, calm)
    memory = _noted(memory, to.name, now)
    held = now - memory.since
    if held < rules.hold_seconds:
        wait = f"{to.name} gets groups once it has been short for {rules.hold_seconds:.0f} s"
        return Verdict(State.HOLDING, f"{wait}; {told}", replicas, memory)
    is_back = undo is None and _is_back(move, memory, rules, now)
    backoff = min(MAX_BACKOFF, 2 ** (memory.num_reversals + 1)) if is_back else 1
    if memory.moved_at is not None and now - memory.moved_at < backoff * rules.cooldown_seconds:
        wait = f"{to.name} gets groups {backoff * rules.cooldown_seconds:.0f} s after the last move"
        return Verdict(State.COOLING, f"{wait}; {told}", replicas, memory)
    replicas[to.name] += move.num_got
    replicas[giver.name] -= move.num_given
    is_new = memory.moved_at is None or now - memory.moved_at >= REMEMBERED_COOLDOWNS * rules.cooldown_seconds
    why = f"{move}{', as before the last move' if undo else ''}; {told}"
    after = Memory(
        moved_at=now,
        moved_to=to.name,
        moved_why=why,
        num_reversals=(0 if is_new else memory.num_reversals) + is_back,
        floors=memory.floors,
    )
    if undo:
        floor = Floor(to.name, replicas[to.name], now + REMEMBERED_COOLDOWNS * rules.cooldown_seconds)
        others = tuple(other for other in memory.floors if other.role != to.name)
        return Verdict(State.MOVED, why, replicas, replace(after, floors=(*others, floor)))
    after = replace(after, num_got=move.num_got, num_given=move.num_given, pressure=to.pressed.pressure)
    return Verdict(State.MOVED, why, replicas, after)


def fitted(first: Side, second: Side, gpu_budget: int) -> dict[str, int]:
    """The counts within their bounds and, with the least of both, within the budget: groups go where most are over the
    minimum. The budget must hold the minimum of both."""
    sides = {side.name: side for side in (first, second)}
    counts = {s.name: max(s.min_replicas, min(s.max_replicas, s.replicas)) for s in sides.values()}
    while sum(counts[name] * side.gpus for name, side in sides.items()) > gpu_budget:
        spare = {name: (counts[name] - side.min_replicas) * side.gpus for name, side in sides.items()}
        most = max(spare, key=lambda name: spare[name])
        if not spare[most]:
            break  # the rules of the resource forbid it
        counts[most] -= 1
    return counts


def _noted(memory: Memory, role: str, now: float) -> Memory:
    """The memory with the need of a role, from now on or since before."""
    if memory.short != role or now - memory.seen > MAX_GAP_SECONDS or memory.since > now:
        return replace(memory, short=role, since=now, seen=now)
    return replace(memory, seen=now) if now - memory.seen >= CONFIRM_SECONDS else memory


def _is_back(move: Move, memory: Memory, rules: Rules, now: float) -> bool:
    """Whether a role is to give what it was given."""
    if memory.moved_at is None or not move.num_given or memory.moved_to != move.giver.name:
        return False
    return now - memory.moved_at < REMEMBERED_COOLDOWNS * rules.cooldown_seconds


def _undo(to: Side, giver: Side, rules: Rules, memory: Memory) -> Move | None:
    """The last move taken back, if it took from `to` and that is now worse off than the other role was."""
    if memory.moved_to != giver.name or not memory.num_given or to.pressed is None:
        return None
    back, left = to.replicas + memory.num_given, giver.replicas - memory.num_got
    fits = back * to.gpus + left * giver.gpus <= rules.gpu_budget
    is_allowed = fits and back <= to.max_replicas and left >= giver.min_replicas
    is_worse = to.pressed.pressure > memory.pressure
    return Move(to, memory.num_given, giver, memory.num_got) if is_allowed and is_worse else None


def _floored(side: Side, memory: Memory) -> Side:
    """The role with the count that it was short below as its least."""
    floors = [floor.replicas for floor in memory.floors if floor.role == side.name]
    return replace(side, min_replicas=max([side.min_replicas, *(min(floor, side.replicas) for floor in floors)]))


def _move(to: Side, giver: Side, rules: Rules) -> tuple[Move | None, str]:
    """The move that helps `to`, or why there is none."""
    if to.replicas >= to.max_replicas:
        return None, f"{to.name} is short and has its maxReplicas, {to.max_replicas}"
    free = rules.gpu_budget - to.replicas * to.gpus - giver.replicas * giver.gpus
    wanted = min(_num_wanted(to), to.max_replicas - to.replicas)
    if free >= to.gpus:
        return Move(to, min(wanted, free // to.gpus), giver, 0), ""
    for num_got in range(wanted, 0, -1):
        num_given = math.ceil((num_got * to.gpus - free) / giver.gpus)
        if _can_give(giver, num_given):
            room = (free + num_given * giver.gpus) // to.gpus
            return Move(to, min(room, to.max_replicas - to.replicas), giver, num_given), ""
    fewest = math.ceil((to.gpus - free) / giver.gpus)
    return None, f"{to.name} is short, and {giver.name} {_why_not(giver, fewest)}"


def _num_wanted(side: Side) -> int:
    """How many more groups would bring the load of a short role to `AIM`; at most as many as it has."""
    known, count = side.pressed, side.replicas
    if known is None or not known.load:
        return 1
    share = math.pow(min(known.load, math.pow(2.0, known.growth)) / AIM, 1 / known.growth)
    needed = math.ceil(count * share)
    return max(1, min(needed - count, count))


def _can_give(side: Side, num_given: int) -> bool:
    left = side.replicas - num_given
    return (
        side.pressed is not None
        and left >= max(1, side.min_replicas)
        and side.pressed.pressure <= RELIEF
        and side.pressed.load_with(side.replicas, left) <= RELIEF
    )


def _why_not(side: Side, num_given: int) -> str:
    left = side.replicas - num_given
    if left < max(1, side.min_replicas):
        return f"would have {max(0, left)} groups without the {num_given} to give, of {side.min_replicas} at the least"
    if side.pressed and side.pressed.pressure > RELIEF:
        return f"is at {side.pressed.pressure:.2f} of its targets itself, over {RELIEF}"
    load = side.pressed.load_with(side.replicas, left) if side.pressed else 0.0
    return f"would be at {load:.2f} of what {left} groups can do, over {RELIEF}"
