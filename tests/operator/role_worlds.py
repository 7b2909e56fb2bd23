"""Builders of planner input, and a cluster in small that does what plans say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from headrace_operator.groups import GroupKey, GroupState, Pod, Rebuild, RoleState, Strategy, Trouble, group_state
from headrace_operator.leeway import Leeway, leeway
from headrace_operator.names import REASON_CRASH_LOOP
from headrace_operator.plans import RolePlan
from headrace_operator.rollout import plan_deployment

NOW = 1000.0


def pod(
    index: int = 0, phase: str = "Running", ready: bool = True, deadline: float | None = None, **more: object
) -> Pod:
    return Pod(f"pod-{index}", f"uid-{index}", index, phase, ready, deadline=deadline, **more)  # type: ignore[arg-type]


RUNNING = pod()
STARTING = pod(ready=False)
PENDING = pod(phase="Pending", ready=False)
FAILED = pod(phase="Failed", ready=False, trouble=Trouble(REASON_CRASH_LOOP, "pod-0 exited with code 1\nlast words"))
GOING = pod(deadline=NOW + 10)


def key(revision: str, index: int, role: str = "decode") -> GroupKey:
    return GroupKey(role, revision, index)


def state(
    groups: Mapping[tuple[str, int], tuple[Pod, ...]],
    *,
    role: str = "decode",
    replicas: int = 1,
    size: int = 1,
    rebuilds: Mapping[tuple[str, int], Rebuild] | None = None,
    leaving: Sequence[tuple[str, int]] = (),
    wanted: str = "new",
    known: tuple[str, ...] = ("new", "old"),
    fingerprints: Mapping[str, str] | None = None,
    gpus: int = 0,
) -> RoleState:
    return RoleState(
        role=role,
        revision=wanted,
        replicas=replicas,
        groups={key(revision, index, role): pods for (revision, index), pods in groups.items()},
        sizes=dict.fromkeys(known, size),
        rebuilds={key(revision, index, role): noted for (revision, index), noted in (rebuilds or {}).items()},
        leaving=frozenset(key(revision, index, role) for revision, index in leaving),
        fingerprints=fingerprints or {},
        costs=dict.fromkeys(known, gpus) if gpus else {},
    )


def plan_role(role: RoleState, now: float, strategy: Strategy | None = None) -> RolePlan:
    return plan_deployment([role], strategy or Strategy(), now)[role.role]


def created(plan: RolePlan) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(c.key.revision, c.key.index, c.pods) for c in plan.create]


def deleted(plan: RolePlan) -> list[tuple[str, int | None]]:
    return [(d.uid, d.grace_seconds) for d in plan.delete]


@dataclass
class Wanted:
    """What a test asks of one role: like a role of a spec."""

    revision: str
    replicas: int
    size: int = 1
    gpus: int = 1  # of a group


@dataclass
class World:
    """A cluster in which pods become ready after two steps and deletions take one; groups of `bad` revisions fail.

    The KV fingerprint of a revision is its first letter, in capitals. With `capacity`, so many GPUs exist.
    """

    strategy: Strategy = field(default_factory=Strategy)
    drain_steps: int = 0  # between the decision to delete a ready group and its deletion, during which it is unready
    bad: frozenset[str] = frozenset()
    hangs: frozenset[str] = frozenset()  # first letters of revisions whose pods run and never get ready
    capacity: int | None = None
    groups: dict[GroupKey, list[Pod]] = field(default_factory=dict)
    rebuilds: dict[GroupKey, Rebuild] = field(default_factory=dict)
    leaving: frozenset[GroupKey] = frozenset()
    shapes: dict[tuple[str, str], Wanted] = field(default_factory=dict)  # of every revision seen, by role
    draining: dict[GroupKey, int] = field(default_factory=dict)  # for how many steps
    now: float = 0.0
    num_made: int = 0
    plans: dict[str, RolePlan] = field(default_factory=dict)

    def leeway(self, want: Wanted) -> Leeway:
        """Groups that a roll-out may add to, and take from, a role."""
        return leeway(self.strategy.max_surge, self.strategy.max_unavailable, want.replicas)

    def gpus_in_use(self) -> int:
        return sum(self.shapes[k.role, k.revision].gpus for k in self.groups)

    def state_of(self, k: GroupKey) -> GroupState:
        return group_state(tuple(self.groups.get(k, ())), self.shapes[k.role, k.revision].size)

    def available_slots(self, role: str) -> set[int]:
        """Indices at which a group has been ready for as long as the strategy asks."""
        latest = self.now - self.strategy.min_ready_seconds
        return {
            k.index
            for k, pods in self.groups.items()
            if k.role == role
            and self.state_of(k) is GroupState.READY
            and all((p.ready_since or 0.0) <= latest for p in pods)
        }

    def num_ready(self, role: str = "decode", revision: str | None = None) -> int:
        return sum(
            k.role == role and revision in (None, k.revision) and self.state_of(k) is GroupState.READY
            for k in self.groups
        )

    def num_groups(self, role: str) -> int:
        return sum(k.role == role for k in self.groups)

    def states(self, wanted: Mapping[str, Wanted]) -> list[RoleState]:
        result = []
        for role, want in wanted.items():
            self.shapes[role, want.revision] = want
            known = {revision: shape for (of, revision), shape in self.shapes.items() if of == role}
            result.append(
                RoleState(
                    role=role,
                    revision=want.revision,
                    replicas=want.replicas,
                    groups={k: tuple(pods) for k, pods in self.groups.items() if k.role == role},
                    sizes={revision: shape.size for revision, shape in known.items()},
                    rebuilds={k: noted for k, noted in self.rebuilds.items() if k.role == role},
                    leaving=frozenset(k for k in self.leaving if k.role == role),
                    fingerprints={revision: revision[0].upper() for revision in known},
                    costs={revision: shape.gpus for revision, shape in known.items()},
                )
            )
        return result

    def plan(self, wanted: Mapping[str, Wanted]) -> dict[str, RolePlan]:
        states = self.states(wanted)
        free = None if self.capacity is None else self.capacity - self.gpus_in_use()

        def admit(k: GroupKey) -> str | None:
            nonlocal free
            if free is None:
                return None
            need = self.shapes[k.role, k.revision].gpus
            if need > free:
                return f"{need} GPUs are needed, {free} are free"
            free -= need
            return None

        return plan_deployment(states, self.strategy, self.now, admit)

    def step(self, wanted: Mapping[str, Wanted]) -> dict[str, RolePlan]:
        """One plan and one second of time."""
        self.plans = self.plan(wanted)
        self.rebuilds = {k: noted for plan in self.plans.values() for k, noted in plan.rebuilds}
        self.leaving = frozenset(k for plan in self.plans.values() for k in plan.leaving)
        gone = self._drained()
        for k, pods in list(self.groups.items()):
            kept = [self._aged(k, p) for p in pods if not p.is_terminating]
            self.groups[k] = [replace(p, deadline=self.now, is_ready=False) if p.uid in gone else p for p in kept]
            if not self.groups[k]:
                del self.groups[k]
        for creation in (c for plan in self.plans.values() for c in plan.create):
            for index in creation.pods:
                self.num_made += 1
                self.groups.setdefault(creation.key, []).append(Pod(f"p{index}", f"u{self.num_made}", index, "Pending"))
        self.now += 1.0
        return self.plans

    def _drained(self) -> set[str]:
        """uids of the pods that are deleted now; those that are still drained become unready instead."""
        planned = {deletion.uid: deletion for plan in self.plans.values() for deletion in plan.delete}
        draining = {}
        for k, pods in self.groups.items():
            deletions = [planned[p.uid] for p in pods if p.uid in planned]
            if not deletions or any(d.grace_seconds is not None for d in deletions):
                continue
            steps = self.draining.get(k, 0) + 1
            if steps <= self.drain_steps and not any(p.is_terminating or p.phase == "Pending" for p in pods):
                draining[k] = steps
                for p in pods:
                    del planned[p.uid]
        self.draining = draining
        return set(planned)

    def _aged(self, k: GroupKey, old: Pod) -> Pod:
        if old.phase == "Pending":
            return replace(old, phase="Running")
        if old.phase != "Running":
            return old
        if k in self.draining:
            return replace(old, is_ready=False, ready_since=None)
        if k.revision in self.bad:
            return replace(old, phase="Failed", is_ready=False)
        if k.revision[0] in self.hangs:
            return old
        return old if old.is_ready else replace(old, is_ready=True, ready_since=self.now)

    def is_settled(self, wanted: Mapping[str, Wanted]) -> bool:
        return all(plan.is_idle for plan in self.plans.values()) and self.is_as_wanted(wanted)

    def is_as_wanted(self, wanted: Mapping[str, Wanted]) -> bool:
        return all(
            self.num_groups(role) == self.num_ready(role) == want.replicas
            and self.num_ready(role, want.revision) >= want.replicas - self.strategy.partition
            for role, want in wanted.items()
        )

    def settle(self, wanted: Mapping[str, Wanted], max_steps: int = 400) -> None:
        for _ in range(max_steps):
            self.step(wanted)
            if self.is_settled(wanted):
                return
        raise AssertionError(f"not settled: {self.groups} {self.plans}")

    def lose_group(self, role: str) -> None:
        """A group of the role vanishes whole."""
        del self.groups[min(k for k in self.groups if k.role == role)]

    def make_unready(self, number: int) -> None:
        """The pods of one group fail their probe for a moment."""
        keys = sorted(k for k in self.groups if self.state_of(k) is GroupState.READY)
        if keys:
            k = keys[number % len(keys)]
            self.groups[k] = [replace(p, is_ready=False, ready_since=None) for p in self.groups[k]]

    def lose_pod(self, number: int) -> None:
        """One pod vanishes, as with its node."""
        pods = [(k, p) for k, members in sorted(self.groups.items()) for p in members]
        if pods:
            k, lost = pods[number % len(pods)]
            self.groups[k].remove(lost)
            if not self.groups[k]:
                del self.groups[k]
