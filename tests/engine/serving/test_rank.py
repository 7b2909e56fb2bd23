"""The rank's loop beside its group: what it tells the others before a step, and what it takes from their answer."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine.serving.toy import ToyModel, expected

from headrace_engine.core import EngineRequest, Leg, RequestError, SamplingParams
from headrace_engine.ep.local import LocalExchange
from headrace_engine.group import Agreement
from headrace_engine.kv.blocks import BlockPool
from headrace_engine.kv.layout import allocate_cache
from headrace_engine.messages import Abort, Add, Batch, Failed, FromRank, Shutdown, Tokens, ToRank, Wake, Welcome
from headrace_engine.rank import RankLoop
from headrace_engine.runner import Runner
from headrace_engine.scheduler import Scheduler, SchedulerLimits
from headrace_engine.sequence import StepOutput

BLOCK, NUM_BLOCKS, NUM_SLOTS = 4, 16, 8


class Control:
    """A frontend whose messages are given turn by turn."""

    def __init__(self) -> None:
        self.inbox: list[list[ToRank]] = []
        self.sent: list[FromRank] = []
        self.waits: list[float] = []

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)

    def receive(self) -> list[ToRank]:
        return self.inbox.pop(0) if self.inbox else []

    def send(self, message: FromRank) -> None:
        self.sent.append(message)

    def tokens(self) -> list[int]:
        items = [item for message in self.sent if isinstance(message, Batch) for item in message.items]
        return [token for item in items if isinstance(item, Tokens) for token in item.token_ids]


class Group:
    """The other ranks of a group: records what this one says; `answer` overrides what all decide."""

    def __init__(self) -> None:
        self.said: list[dict[str, bool]] = []
        self.answer: dict[str, Any] = {}

    def agree(self, **flags: bool) -> Agreement:
        self.said.append(flags)
        agreement = Agreement(flags["has_work"], flags["wants_to_leave"], flags["generates"], 1.0)
        return Agreement(**{**vars(agreement), **self.answer})


class Grammars(dict[str, EngineRequest]):
    """Requests whose grammar is being compiled, until a test says what has come of it."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[EngineRequest, Any]] = []

    @property
    def is_empty(self) -> bool:
        return not self and not self.done

    def add(self, request: EngineRequest, _: float) -> None:
        self[request.request_id] = request

    def abort(self, request_id: str) -> bool:
        return self.pop(request_id, None) is not None

    def finish(self, request_id: str, result: Any) -> None:
        self.done.append((self.pop(request_id), result))

    def poll(self, _: float) -> list[tuple[EngineRequest, Any]]:
        done, self.done = self.done, []
        return done


class Rank:
    def __init__(self) -> None:
        self.control, self.group = Control(), Group()
        limits = SchedulerLimits(64, 2, 4, 8, 64, frozenset())
        pool = BlockPool(NUM_BLOCKS, NUM_SLOTS, BLOCK)
        self.scheduler = Scheduler(limits, pool, has_snapshots=True)
        model = ToyModel(BLOCK)
        self.steps: list[list[int]] = []  # tokens of each row of each forward
        runner = Runner(
            model,
            allocate_cache(model.cache_groups, BLOCK, NUM_BLOCKS, NUM_SLOTS),
            LocalExchange(),
            max_batch_tokens=64,
            max_sequences=4,
            max_blocks=16,
            num_slots=NUM_SLOTS,
        )
        run = runner.run

        def recording_run(rows: Any) -> StepOutput:
            self.steps.append([row.num_tokens for row in rows])
            return run(rows)

        runner.run = recording_run  # type: ignore[method-assign]
        self.grammars = Grammars()
        self.loop = RankLoop(0, self.control, self.scheduler, runner, None, self.group, self.grammars)  # type: ignore[arg-type]

    def turn(self, *messages: ToRank) -> bool:
        self.control.inbox.append(list(messages))
        return self.loop._turn()


@pytest.fixture
def rank() -> Rank:
    return Rank()


def add(prompt: list[int], max_tokens: int = 3, name: str = "r") -> Add:
    return Add(EngineRequest(name, Leg.WHOLE, prompt, SamplingParams(max_tokens, temperature=0)))


@pytest.mark.parametrize(
    ("messages", "is_woken"),
    [
        ((), False),
        ((Welcome(),), False),
        ((Wake(),), True),
        ((Wake(), Welcome()), True),
        ((Welcome(), Wake()), True),
        ((Abort("nobody"), Welcome()), True),
    ],
)
def test_a_wake_is_passed_on_to_the_group_and_a_beat_is_not(
    rank: Rank, messages: tuple[ToRank, ...], is_woken: bool
) -> None:
    rank.turn(*messages)
    assert rank.group.said[-1]["was_woken"] is is_woken
    rank.turn()
    assert rank.group.said[-1]["was_woken"] is False, "once"


def test_a_rank_without_work_runs_along_when_another_has_some(rank: Rank) -> None:
    rank.turn()
    assert rank.steps == []
    rank.group.answer = {"must_run": True}
    rank.turn()
    assert rank.steps == [[]]


def test_every_turn_has_exactly_one_agreement_whatever_happens_in_it(rank: Rank) -> None:
    turns: list[tuple[ToRank, ...]] = [
        (),
        (add([20, 21, 22]),),
        (add([30], name="gone"), Abort("gone"), add([20])),  # r's id is in use: refused
        (Welcome(),),
        (Abort("r"),),
        (),
    ]
    for number, messages in enumerate(turns, 1):
        rank.turn(*messages)
        assert len(rank.group.said) == number
    assert rank.control.tokens() == expected([20, 21, 22], 3)
    assert rank.scheduler.is_empty


def test_a_rank_says_when_it_generates_and_heeds_that_others_do(rank: Rank) -> None:
    rank.group.answer = {"any_generates": True}
    rank.turn()
    assert rank.group.said[-1]["generates"] is False
    rank.turn(add(list(range(20, 24)), max_tokens=2))
    rank.turn()
    assert rank.steps == [[2], [2]], "in small pieces, since another rank's answers wait for this step"
    rank.turn()
    assert rank.group.said[-1]["generates"] is True


def test_a_rank_leaves_only_when_all_do(rank: Rank) -> None:
    rank.group.answer = {"may_leave": False}
    assert rank.turn(Shutdown()) is False
    rank.group.answer = {}
    assert rank.turn() is True


def test_a_rank_with_a_request_does_not_want_to_leave(rank: Rank) -> None:
    rank.turn(add([20], max_tokens=2), Shutdown())
    assert rank.group.said[-1]["wants_to_leave"] is False
    rank.turn()
    rank.turn()
    assert rank.group.said[-1]["wants_to_leave"] is True


class Free:
    """A guide that rules nothing out yet."""

    def follow(self, *_: Any) -> bool:
        return False


def guided(name: str = "r") -> Add:
    return Add(EngineRequest(name, Leg.WHOLE, [40, 41], SamplingParams(2, temperature=0, grammar="any")))


def test_a_request_with_a_grammar_runs_once_that_is_compiled_and_the_group_stays_awake(rank: Rank) -> None:
    rank.turn(guided())
    assert rank.steps == []
    rank.turn()
    assert rank.group.said[-1]["was_woken"]
    assert not rank.group.said[-1]["wants_to_leave"]
    rank.grammars.finish("r", Free())
    rank.turn()
    rank.turn()
    assert rank.control.tokens() == expected([40, 41], 2)


def test_a_rank_leaves_only_when_no_grammar_is_being_compiled(rank: Rank) -> None:
    rank.turn(guided(), Shutdown())
    assert not rank.group.said[-1]["wants_to_leave"]
    rank.turn(Abort("r"))
    rank.turn()
    assert rank.group.said[-1]["wants_to_leave"]


def test_a_grammar_that_cannot_be_ends_its_request_alone(rank: Rank) -> None:
    rank.turn(guided(), add([40, 41], 2, "other"))
    rank.grammars.finish("r", RequestError(400, "no"))
    for _ in range(3):
        rank.turn()
    items = [item for message in rank.control.sent if isinstance(message, Batch) for item in message.items]
    assert [item.request_id for item in items if isinstance(item, Failed)] == ["r"]
    assert rank.control.tokens() == expected([40, 41], 2)


def test_a_model_that_reads_ahead_hears_of_a_prompt_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    announced: list[tuple[int, list[int]]] = []  # steps before it, prompt
    rank = Rank()

    def read_ahead(_: ToyModel, token_ids: list[int]) -> None:
        announced.append((len(rank.steps), token_ids))

    monkeypatch.setattr(ToyModel, "read_ahead", read_ahead, raising=False)
    rank.turn(add([20, 21, 22]))
    assert announced == [(0, [20, 21, 22])]
    assert len(rank.steps) == 1
