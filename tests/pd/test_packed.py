"""Prefill and decode apart over caches of packed records, whose bytes are pushed as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.pd.engines import BLOCK, Engine, completion, generate, pd_tokens, prompts_of, round_trip, running
from tests.pd.ranks import generate_alone, tiny_pair

LENGTHS = [1, 2, BLOCK - 1, BLOCK, 2 * BLOCK + 1, 3 * BLOCK + 2]
MAX_TOKENS = 4


@pytest.mark.parametrize(("family", "cache_dtype"), [("v4", "fp8"), ("v41", "fp4")])
def test_apart_and_together_give_the_same_tokens(family: str, cache_dtype: str, tmp_path: Path) -> None:
    with tiny_pair(tmp_path, family, cache_dtype) as (model, pair):
        for prompt in prompts_of(LENGTHS):
            assert pair.generate(prompt, MAX_TOKENS) == generate_alone(model, prompt, MAX_TOKENS)[0], len(prompt)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "cache_dtype"), [("v4", "fp8"), ("v41", "fp4")])
def test_processes_push_records_of_the_kind_that_was_asked_for(family: str, cache_dtype: str) -> None:
    flags = ("--cache-dtype", cache_dtype, "--fake-quantization", "cache")
    roles = ("prefill", "decode", "unified")
    prefill, decode, unified = (Engine("--role", role, *flags, family=family) for role in roles)
    with running(prefill, decode, unified):
        for prompt in prompts_of([1, BLOCK, 2 * BLOCK + 1, 131], first=5):
            expected = generate(unified.url, prompt)
            assert pd_tokens(prefill.url, decode.url, prompt) == expected, len(prompt)
            several = round_trip(prefill.url, decode.url, completion(prompt, n=2))["choices"]
            assert [choice["token_ids"] for choice in several] == [expected, expected]
        prefill.wait_all_free()
        decode.wait_all_free()
