"""Rotary frequencies of the two rope kinds."""

from __future__ import annotations

import pytest
import torch

from headrace_engine.kernels.norm_rope import rotate
from headrace_engine.models.config_values import RopeConfig, Yarn
from headrace_engine.models.rope import frequencies, step_rope


def test_scores_depend_on_distance_only_far_beyond_the_original_context() -> None:
    torch.manual_seed(0)
    table = frequencies(RopeConfig(160000.0, Yarn(16.0, 65536, 32.0, 1.0)), 64)
    q, k = torch.randn(1, 64), torch.randn(1, 64)
    scores = []
    for start in (0, 70_000, 900_000):
        positions = torch.tensor([start + 100, start])
        rope = step_rope(positions, table)
        scores.append(
            float(rotate(q.clone(), rope.cos[:1], rope.sin[:1]) @ rotate(k.clone(), rope.cos[1:], rope.sin[1:]).T)
        )
    # fp32 angles carry an error of about position * 6e-8
    assert scores == pytest.approx([scores[0]] * 3, abs=1.0)
    assert scores[1] == pytest.approx(scores[0], abs=0.1)


def test_yarn_keeps_fast_pairs_and_divides_slow_ones() -> None:
    """The published model: pairs up to 15 as they are, from 25 on divided by 16."""
    plain = frequencies(RopeConfig(160000.0), 64)
    scaled = frequencies(RopeConfig(160000.0, Yarn(16.0, 65536, 32.0, 1.0)), 64)
    torch.testing.assert_close(scaled[:16], plain[:16])
    torch.testing.assert_close(scaled[25:], plain[25:] / 16)
    assert bool((scaled[16:25] < plain[16:25]).all())
    assert bool((scaled[16:25] > plain[16:25] / 16).all())
