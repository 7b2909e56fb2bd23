"""The hand that drives a model for `make bench-steps`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.bench.stepping import PARTS, REST, Stepper, Stopwatch

from headrace_engine import kernels, models
from headrace_engine.models.tiny import write_tiny


@pytest.fixture(scope="module", params=["v4", "v41"])
def stepper(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stepper:
    path = tmp_path_factory.mktemp(f"tiny-{request.param}")
    write_tiny(path, request.param, 0)
    return Stepper(models.load(Path(path)), max_context=600, max_batch=2)


@pytest.mark.parametrize(("batch", "context"), [(1, 599), (2, 20)])
def test_a_decode_step_has_logits_of_each_sequence(stepper: Stepper, batch: int, context: int) -> None:
    logits = stepper.decode(batch, context)
    assert len(logits) == batch
    assert torch.isfinite(logits).all()


def test_logits_of_a_prompt_owe_nothing_to_what_the_cache_held(stepper: Stepper) -> None:
    tokens = [20 + (7 * i) % 200 for i in range(40)]
    before = stepper.prompt_logits(tokens)
    stepper.prefill(300, 300)
    assert before.shape[0] == len(tokens)
    assert torch.equal(stepper.prompt_logits(tokens), before)
    # Causal: each position's logits are those of the prompt that ends there.
    torch.testing.assert_close(stepper.prompt_logits(tokens[:17]), before[:17], atol=1e-4, rtol=0)


def test_more_than_the_cache_holds_is_refused(stepper: Stepper) -> None:
    with pytest.raises(ValueError, match="2 sequences of 600 tokens"):
        stepper.decode(2, 599)


def test_the_parts_of_a_step_are_all_of_it_and_the_kernels_are_left_as_they_were(stepper: Stepper) -> None:
    before = {name: getattr(kernels, name) for names in PARTS.values() for name in names}
    with Stopwatch() as stopwatch:
        stepper.prefill(40, 16)
    assert {name: getattr(kernels, name) for name in before} == before
    shares = stopwatch.shares(total_seconds=1000)
    # DeepSeek-V4.1 closes its groups with torch alone.
    assert all(shares[part] > 0 for part in PARTS if part != "compressor")
    assert sum(shares.values()) == pytest.approx(1)
    assert shares[REST] > 0.5
