"""Real engines that end, die and hang while OpenAI's own client keeps asking through the router.

A machine that hangs is the worst of these: its connections stay open and say nothing. Whatever happens, requests that
have no token yet are answered by another group, answers that have begun end with an explicit error, and no token is
wrong, also when the machine wakes up again and goes on where it stood.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e.support.reference import greedy_batch
from e2e.support.traffic import Outcome, Question, Report, traffic
from tests.pd.engines import MODEL, Engine, Routed, running

pytestmark = pytest.mark.slow
NUM_PROMPTS, PROMPT_LENGTH, NUM_TOKENS = 6, 40, 24
UNRESPONSIVE_SECONDS = 4.0
HANG_SECONDS = 2 * UNRESPONSIVE_SECONDS


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    prompts = [[4 + (7 * i + 31 * n + i * i) % 250 for i in range(PROMPT_LENGTH)] for n in range(NUM_PROMPTS)]
    answers = greedy_batch(prompts, NUM_TOKENS)
    return [Question(tuple(prompt), tuple(answer)) for prompt, answer in zip(prompts, answers, strict=True)]


@pytest.fixture(scope="module")
def routed() -> Iterator[Routed]:
    engines = {role: [Engine("--role", role) for _ in range(2)] for role in ("prefill", "decode")}
    with running(*engines["prefill"], *engines["decode"]):
        router = Routed(engines, "--unresponsive-seconds", str(UNRESPONSIVE_SECONDS))
        try:
            router.wait_ready()
            yield router
        finally:
            router.stop()


def family(pid: int) -> list[int]:
    """A process and everything that it has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in family(int(child)))]


def signal_all(engine: Engine, number: signal.Signals) -> None:
    for pid in family(engine.process.pid):
        os.kill(pid, number)


def under_traffic(routed: Routed, questions: list[Question], action: Callable[[], None]) -> Report:
    with traffic(routed.url, MODEL, questions, num_clients=4) as report:
        time.sleep(1.0)
        action()
        time.sleep(1.0)
    return report


@pytest.mark.parametrize(
    ("role", "allowed"), [("prefill", [Outcome.RIGHT]), ("decode", [Outcome.RIGHT, Outcome.BROKEN])]
)
def test_a_machine_that_hangs_costs_only_answers_that_have_begun(
    routed: Routed, questions: list[Question], role: str, allowed: list[Outcome]
) -> None:
    engine = routed.engines[role][0]

    def hang() -> None:
        signal_all(engine, signal.SIGSTOP)
        try:
            time.sleep(HANG_SECONDS)
        finally:
            signal_all(engine, signal.SIGCONT)
        time.sleep(1.0)

    report = under_traffic(routed, questions, hang)
    assert report.count(*allowed) == len(report.answers), str(report)
    routed.wait_ready()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_that_is_told_to_end_costs_nothing(routed: Routed, questions: list[Question], role: str) -> None:
    engine = routed.engines[role].pop(0)

    def end() -> None:
        engine.process.send_signal(signal.SIGTERM)
        engine.process.wait(60)

    report = under_traffic(routed, questions, end)
    assert report.count(Outcome.RIGHT) == len(report.answers) > 0, str(report)
