"""Several answers of one prompt with prefill and decode apart: the tokens of each are those of a unified rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.pd.engines import BLOCK, prompts_of
from tests.pd.ranks import Side, tiny_pair

from headrace_engine.core import Leg, Role, SamplingParams

LENGTHS = [1, BLOCK + 1, 2 * BLOCK + 3]  # without state, with full blocks only, with one that is not full
SAMPLINGS = [SamplingParams(4, temperature=1.0, ignore_eos=True, seed=seed) for seed in (3, 4, 5)]


@pytest.mark.parametrize(("family", "cache_dtype"), [("v4", "fp8"), ("v41", "float32")])
def test_answers_share_what_was_pushed_once(family: str, cache_dtype: str, tmp_path: Path) -> None:
    with tiny_pair(tmp_path, family, cache_dtype) as (model, pair):
        for prompt in prompts_of(LENGTHS):
            together = Side(model, Role.UNIFIED)
            for number, sampling in enumerate(SAMPLINGS):
                together.add(str(number), Leg.WHOLE, prompt, sampling)
            while not together.scheduler.is_empty:
                together.turn()
            expected = list(together.answers.values())
            assert pair.generate_several(prompt, SAMPLINGS) == expected, len(prompt)
            assert len(set(map(tuple, expected))) == len(SAMPLINGS)
        # Without room for more than one, the others compute the prompt on the decode rank.
        pair.decode.scheduler.limits = replace(pair.decode.scheduler.limits, max_sequences=1)
        assert pair.generate_several(prompt, SAMPLINGS) == expected
