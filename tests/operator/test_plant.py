"""Auto scaling as a closed loop around a simulated deployment (`plant.py`): it converges, follows, comes to rest."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.operator.plant import Loop, Mix, loop

from headrace_operator.balance import State

LONG_PROMPTS = Mix(rate=10, prompt=6000, answer=150)  # 3.75 groups of prefill to compute, one of decode
LONG_ANSWERS = Mix(rate=10, prompt=1500, answer=600)
EVEN = Mix(rate=8, prompt=4000, answer=400)
TOO_MUCH = Mix(rate=30, prompt=4000, answer=400)
FAST = {"hold_seconds": 30.0, "cooldown_seconds": 120.0}


def good_share(run: Loop, since: float) -> float:
    """Requests that ended within both targets, of all that came, from then on."""
    return sum(when >= since for when in run.plant.good) / (10 * (run.plant.now - since))


def test_it_gives_to_the_role_that_is_short_and_comes_to_rest() -> None:
    run = loop(2, 6, lambda now: LONG_PROMPTS, **FAST)
    run.run(600)
    assert len(run.moves) <= 3
    assert run.replicas["prefill"] >= 4
    assert run.verdicts[-1].state is State.BALANCED
    assert good_share(run, since=500) > 0.9


def test_a_deployment_that_keeps_its_targets_is_left_alone() -> None:
    run = loop(4, 4, lambda now: EVEN, **FAST)
    run.run(600)
    assert run.moves == []
    assert {verdict.state for verdict in run.verdicts} == {State.BALANCED}


def test_where_both_are_short_nothing_is_moved() -> None:
    run = loop(4, 4, lambda now: TOO_MUCH, **FAST)
    run.run(300)
    assert run.moves == []
    assert run.verdicts[-1].state is State.LIMITED


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mix", [EVEN, LONG_PROMPTS, LONG_ANSWERS], ids=["even", "prompts", "answers"])
def test_one_mix_never_takes_it_back_and_forth(mix: Mix, seed: int) -> None:
    run = loop(4, 4, lambda now: mix, seed, **FAST)
    run.run(1800)
    directions = [counts["prefill"] > before["prefill"] for (_, before), (_, counts) in pairwise(run.moves)]
    assert len(set(directions)) <= 1, run.moves
    assert len(run.moves) <= 3


@pytest.mark.slow
def test_it_follows_a_shift_of_the_load_and_beats_every_fixed_split(capsys: pytest.CaptureFixture[str]) -> None:
    def mix(now: float) -> Mix:
        return LONG_PROMPTS if now < 900 else LONG_ANSWERS

    runs = {}
    for prefill in range(1, 8):
        runs[f"{prefill}P{8 - prefill}D"] = fixed = loop(prefill, 8 - prefill, mix)
        fixed.run(1800, is_active=False)
    runs["Auto, from 4P4D"] = auto = loop(4, 4, mix, **FAST)
    auto.run(1800)
    good = {name: len(run.plant.good) for name, run in runs.items()}
    with capsys.disabled():
        print("\nrequests answered within their targets, of 18000:", good)
        print("moves:", [(now, f"{counts['prefill']}P{counts['decode']}D") for now, counts in auto.moves])
    best = max(count for name, count in good.items() if not name.startswith("Auto"))
    assert good["Auto, from 4P4D"] > 1.2 * best
    assert auto.replicas["decode"] >= 6
    assert all(after - before >= 120 for (before, _), (after, _) in pairwise(auto.moves))


@pytest.mark.slow
@pytest.mark.parametrize("split", [(3, 3), (2, 4), (4, 2)])
def test_no_more_is_taken_than_the_giver_can_bear(split: tuple[int, int]) -> None:
    """Of six groups 4P2D serves this mix, and hardly: with one decode group answers pile up without end."""
    run = loop(*split, lambda now: LONG_PROMPTS, **FAST)
    run.run(1800)
    assert run.replicas == {"prefill": 4, "decode": 2}
    assert len(run.moves) <= 1
    assert good_share(run, since=900) > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_move_that_its_load_foretold_wrongly_is_undone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, had it not been known that decode's load grows faster than its requests."""
    monkeypatch.setattr("headrace_operator.pressure.DECODE_GROWTH", 1.0)
    run = loop(4, 2, lambda now: LONG_PROMPTS, seed, **FAST)
    run.run(2400)
    assert [counts["prefill"] for _, counts in run.moves] == [5, 4]
    assert run.replicas == {"prefill": 4, "decode": 2}


@pytest.mark.slow
def test_a_load_that_swings_faster_than_it_may_move_costs_few_moves() -> None:
    run = loop(4, 4, lambda now: LONG_PROMPTS if now % 300 < 150 else LONG_ANSWERS, **FAST)
    run.run(3600)
    backs = [0]
    for (before, old), (after, new) in pairwise([(0.0, {"prefill": 4, "decode": 4}), *run.moves]):
        assert before == 0 or after - before >= 120
        backs.append(1 if new["prefill"] > old["prefill"] else -1)
    turns = sum(first * second < 0 for first, second in pairwise(backs))
    assert turns <= 5, "240 + 480 + 960 + 1920 s: each turn waits for twice as long"


@pytest.mark.slow
def test_groups_of_different_sizes_share_one_budget() -> None:
    """Decode groups of four GPUs: what one of them leaves makes four groups of prefill."""
    run = loop(3, 2, lambda now: Mix(rate=10, prompt=6000, answer=60), gpu_budget=11, **FAST)
    run.gpus = {"prefill": 1, "decode": 4}
    run.run(900)
    assert run.replicas == {"prefill": 7, "decode": 1}
    assert good_share(run, since=700) > 0.9
