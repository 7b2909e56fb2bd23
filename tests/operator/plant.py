"""A simulated deployment that scales itself: queues, groups that come and go, and clients; and the loop around it.

A prompt waits for a place in a decode group (its ticket), is computed by a prefill group, first come first served, and
then generates: each step of a decode group takes `STEP_SECONDS` and `STEP_SECONDS_PER_REQUEST` for each of its
requests. Groups are told apart, and say what engines say, of the last half minute. Time advances by whole seconds.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from headrace_operator.balance import Memory, Rules, Side, State, Verdict, balance
from headrace_operator.pressure import Wanted, pressed_decode, pressed_prefill
from headrace_operator.signals import Sample, measured

PREFILL_TOKENS_PER_SECOND = 16_000.0
STEP_SECONDS = 0.02
STEP_SECONDS_PER_REQUEST = 0.0005
MAX_REQUESTS = 96  # of a decode group
PATIENCE_SECONDS = 10  # that a client waits for cache space
START_SECONDS = 40  # until a new group is ready
WINDOW_SECONDS = 30
LOOK_SECONDS = 15
BOUNDS = tuple(0.001 * 2 ** (i / 2) for i in range(38))
WANTED = Wanted(first_token_seconds=2.0, inter_token_seconds=0.06, kv_use=0.9, requests_per_rank=64)


@dataclass(frozen=True)
class Mix:
    """What clients ask for: requests a second, and tokens of each on average."""

    rate: float
    prompt: int
    answer: int


@dataclass
class Request:
    """`home`: its decode group."""

    arrived: float
    prompt_left: float
    answer: int
    home: Group | None = None
    ticket: float = 0.0
    first: float = 0.0


@dataclass
class Group:
    """Of either role. `ready`: from when on it takes requests; `is_leaving`: it takes no more."""

    ready: float
    is_leaving: bool = False
    prompts: deque[Request] = field(default_factory=deque)  # prefill
    num_queued_tokens: float = 0.0  # prefill
    num_awaited: int = 0  # decode: requests that prefill has
    running: list[tuple[float, int, Request]] = field(default_factory=list)  # decode: heap by the last token's number
    num_tokens: float = 0.0  # decode: that each request would have got that was there from the start
    # Of each second: what happened in it.
    times: deque[dict[str, Counter[int]]] = field(default_factory=lambda: deque(maxlen=WINDOW_SECONDS))
    work: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW_SECONDS))  # tokens, seconds

    @property
    def num_live(self) -> int:
        return len(self.prompts) + self.num_awaited + len(self.running)

    def note(self, name: str, seconds: float, count: int = 1) -> None:
        self.times[-1].setdefault(name, Counter())[bisect_left(BOUNDS, seconds)] += count

    def sample(self, now: float) -> Sample:
        totals: dict[str, Counter[int]] = {name: Counter() for name in ("ticket", "prompt", "token")}
        for second in self.times:
            for name, counts in second.items():
                totals[name].update(counts)
        return Sample(
            time=now,
            num_ranks=1,
            num_requests=self.num_live,
            num_running=len(self.running),
            num_waiting_for_kv=self.num_awaited,
            num_queued_tokens=int(self.num_queued_tokens),
            num_blocks=MAX_REQUESTS,
            num_free_blocks=MAX_REQUESTS - min(MAX_REQUESTS, self.num_live),
            window_seconds=WINDOW_SECONDS,
            num_prompt_tokens=int(sum(tokens for tokens, _ in self.work)),
            prompt_seconds=sum(seconds for _, seconds in self.work),
            bounds=BOUNDS,
            ticket=_counts(totals["ticket"]),
            prompt=_counts(totals["prompt"]),
            inter_token=_counts(totals["token"]),
        )


def _counts(counter: Counter[int]) -> tuple[int, ...]:
    return tuple(counter[i] for i in range(len(BOUNDS) + 1))


class Plant:
    """`mix` by time; `seed` of the arrivals. After `run`: `good` requests were answered within both targets."""

    def __init__(self, prefill: int, decode: int, mix: Callable[[float], Mix], seed: int = 0) -> None:
        self.now = 0.0
        self.groups = {"prefill": [Group(0.0) for _ in range(prefill)], "decode": [Group(0.0) for _ in range(decode)]}
        self._mix = mix
        self._random = random.Random(seed)
        self._due = 0.0
        self._waiting: deque[Request] = deque()
        self.good: list[float] = []  # when they ended
        self.num_ended = 0
        self._num_begun = 0

    def serving(self, role: str) -> list[Group]:
        return [group for group in self.groups[role] if group.ready <= self.now and not group.is_leaving]

    def scale(self, role: str, replicas: int) -> None:
        """Groups leave (the idlest first) or are begun."""
        staying = [group for group in self.groups[role] if not group.is_leaving]
        for group in sorted(staying, key=lambda group: group.num_live)[: max(0, len(staying) - replicas)]:
            group.is_leaving = True
        for _ in range(replicas - len(staying)):
            self.groups[role].append(Group(self.now + START_SECONDS))

    def second(self) -> None:
        """One second passes."""
        for groups in self.groups.values():
            for group in groups:
                group.times.append({})
        self._arrive()
        self._admit()
        for group in self.groups["prefill"]:
            self._prefill(group)
        for group in self.groups["decode"]:
            self._decode(group)
        self.now += 1
        for role, groups in self.groups.items():
            self.groups[role] = [group for group in groups if not group.is_leaving or group.num_live]

    def _arrive(self) -> None:
        mix = self._mix(self.now)
        while self._due <= self.now:
            length = self._random.uniform(0.5, 1.5)
            answer = max(1, round(mix.answer * self._random.uniform(0.5, 1.5)))
            self._waiting.append(Request(self.now, mix.prompt * length, answer))
            self._due += self._random.expovariate(mix.rate)

    def _admit(self) -> None:
        while self._waiting and self.now - self._waiting[0].arrived > PATIENCE_SECONDS:
            self._waiting.popleft()
        prefill, decode = self.serving("prefill"), self.serving("decode")
        while self._waiting and prefill and decode:
            target = min(decode, key=lambda group: group.num_live)
            if target.num_live >= MAX_REQUESTS:
                return
            request = self._waiting.popleft()
            request.ticket, request.home = self.now, target
            target.note("ticket", self.now - request.arrived)
            target.num_awaited += 1
            idlest = min(prefill, key=lambda group: group.num_queued_tokens)
            idlest.prompts.append(request)
            idlest.num_queued_tokens += request.prompt_left

    def _prefill(self, group: Group) -> None:
        left = PREFILL_TOKENS_PER_SECOND
        while group.prompts and left > 0:
            request = group.prompts[0]
            done = min(left, request.prompt_left)
            request.prompt_left -= done
            left -= done
            if request.prompt_left <= 0:
                group.prompts.popleft()
                request.first = self.now + 1 - left / PREFILL_TOKENS_PER_SECOND
                self._generate(request)
        group.num_queued_tokens = max(0.0, group.num_queued_tokens - (PREFILL_TOKENS_PER_SECOND - left))
        used = PREFILL_TOKENS_PER_SECOND - left
        group.work.append((used, used / PREFILL_TOKENS_PER_SECOND))

    def _generate(self, request: Request) -> None:
        home = request.home
        assert home is not None
        home.num_awaited -= 1
        self._num_begun += 1
        heappush(home.running, (home.num_tokens + request.answer, self._num_begun, request))
        home.note("prompt", request.first - request.ticket)

    def _decode(self, group: Group) -> None:
        if not group.running:
            return
        step = STEP_SECONDS + STEP_SECONDS_PER_REQUEST * len(group.running)
        group.note("token", step, round(len(group.running) / step))
        group.num_tokens += 1 / step
        while group.running and group.running[0][0] <= group.num_tokens:
            _, _, request = heappop(group.running)
            self.num_ended += 1
            seconds = self.now + 1 - request.first
            is_good = request.first - request.arrived <= WANTED.first_token_seconds
            if is_good and (seconds - 1) / request.answer <= WANTED.inter_token_seconds:
                self.good.append(self.now)


@dataclass
class Loop:
    """The operator's part: a look every `LOOK_SECONDS`, and its verdicts carried out."""

    plant: Plant
    replicas: dict[str, int]
    rules: Rules
    gpus: Mapping[str, int] = field(default_factory=lambda: {"prefill": 1, "decode": 1})
    max_replicas: int = 100
    memory: Memory = field(default_factory=Memory)
    verdicts: list[Verdict] = field(default_factory=list)
    moves: list[tuple[float, dict[str, int]]] = field(default_factory=list)

    def run(self, seconds: int, is_active: bool = True) -> None:
        for _ in range(seconds):
            self.plant.second()
            if is_active and self.plant.now % LOOK_SECONDS == 0:
                self._look()
            used = sum(len(groups) * self.gpus[role] for role, groups in self.plant.groups.items())
            assert used <= self.rules.gpu_budget, "the budget, groups on their way out included"

    def _look(self) -> None:
        verdict = balance(self._side("prefill"), self._side("decode"), self.rules, self.memory, self.plant.now)
        self.verdicts.append(verdict)
        self.memory = verdict.memory
        if verdict.state is State.MOVED:
            self.moves.append((self.plant.now, dict(verdict.replicas)))
        self.replicas = dict(verdict.replicas)
        # As the planner does it: what is surplus leaves, and others are begun once it has gone.
        room = self.rules.gpu_budget
        for role, count in self.replicas.items():
            here = len(self.plant.groups[role])
            self.plant.scale(role, min(count, here))
            room -= len(self.plant.groups[role]) * self.gpus[role]
        for role, count in self.replicas.items():
            missing = min(count - len(self.plant.groups[role]), room // self.gpus[role])
            if missing > 0:
                self.plant.scale(role, len(self.plant.groups[role]) + missing)

    def _side(self, role: str) -> Side:
        plant = self.plant
        samples = {name: measured([g.sample(plant.now) for g in plant.serving(name)]) for name in self.gpus}
        prefill, decode = samples["prefill"], samples["decode"]
        pressed = None
        if prefill and decode:
            pressed = pressed_prefill(prefill, decode, WANTED) if role == "prefill" else pressed_decode(decode, WANTED)
        return Side(
            name=role,
            replicas=self.replicas[role],
            num_groups=len(plant.groups[role]),
            num_ready=len(plant.serving(role)),
            min_replicas=1,
            max_replicas=self.max_replicas,
            gpus=self.gpus[role],
            pressed=pressed,
        )


def loop(prefill: int, decode: int, mix: Callable[[float], Mix], seed: int = 0, **rules: float) -> Loop:
    """One GPU a group, a budget that is all in use, a hold of 60 s and a cool-down of 300 s if not told otherwise."""
    own = replace(Rules(prefill + decode, 60.0, 300.0), **rules)  # type: ignore[arg-type]
    return Loop(Plant(prefill, decode, mix, seed), {"prefill": prefill, "decode": decode}, own)
