"""Every shape of a prefill group beside every shape of a decode group: the same tokens, whoever computes them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.pd.engines import BLOCK, Engine, group, pd_tokens, prompts_of, running
from tests.pd.reference import Reference

pytestmark = pytest.mark.slow

PREFILL = ["one rank", "DEP2"]
DECODE = ["one rank", "two independent ranks", "DEP2"]
LENGTHS = [1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 33, 200]  # test_round_trip has every residue


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[tuple[str, str], Engine]]:
    """Leaders by role and shape; DEP2 once as two pods and once as one pod of two ranks."""
    prefill, decode = ("--role", "prefill", "--max-batch-tokens", "40"), ("--role", "decode")
    sharded = group(2, *decode)
    leaders = {
        ("prefill", "one rank"): Engine(*prefill),
        ("prefill", "DEP2"): Engine(*prefill, "--data", "2", "--expert-parallel"),
        ("decode", "one rank"): Engine(*decode),
        ("decode", "two independent ranks"): Engine(*decode, "--data", "2"),
        ("decode", "DEP2"): sharded[0],
    }
    with running(*leaders.values(), sharded[1]):
        yield leaders


@pytest.mark.parametrize("prefill", PREFILL)
@pytest.mark.parametrize("decode", DECODE)
def test_one_at_a_time_while_other_ranks_idle(
    engines: dict[tuple[str, str], Engine], reference: Reference, prefill: str, decode: str
) -> None:
    source, target = engines["prefill", prefill], engines["decode", decode]
    for prompt in prompts_of(LENGTHS, first=20 * _number(prefill, decode)):
        assert pd_tokens(source.url, target.url, prompt) == reference.tokens(prompt, 8), len(prompt)
    source.wait_all_free()
    target.wait_all_free()


@pytest.mark.parametrize("prefill", PREFILL)
@pytest.mark.parametrize("decode", DECODE)
def test_uneven_load_on_all_ranks(
    engines: dict[tuple[str, str], Engine], reference: Reference, prefill: str, decode: str
) -> None:
    source, target = engines["prefill", prefill], engines["decode", decode]
    prompts = prompts_of([3 + 11 * i for i in range(9)], first=120 + 10 * _number(prefill, decode))

    def run(prompt: list[int]) -> list[int]:
        return pd_tokens(source.url, target.url, prompt, _max_tokens(prompt))

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(run, prompts)) == [reference.tokens(prompt, _max_tokens(prompt)) for prompt in prompts]
    source.wait_all_free()
    target.wait_all_free()
    for engine in (source, target):
        assert all(rank["num_steps"] > 0 for rank in engine.state()["ranks"])


def _number(prefill: str, decode: str) -> int:
    """Of the pair: each has prompts of its own, so that no decode rank holds blocks that another pair has pushed."""
    return PREFILL.index(prefill) * len(DECODE) + DECODE.index(decode)


def _max_tokens(prompt: list[int]) -> int:
    """A few very different lengths of answers."""
    return (1, 12, 30)[len(prompt) % 3]
