"""What drafters propose: equal to an oracle and the plain reference, however tokens are cut into steps and batches."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.engine.drafters.conftest import FAMILIES, Pair
from tests.engine.drafters.harness import DraftRun
from tests.engine.model.harness import PagedRun, assert_close, random_tokens
from tests.reference.draft_oracle import EXPECTED
from tests.reference.drafters import DsparkReference, Generation, MtpReference

from headrace_engine import models
from headrace_engine.models.deepseek_v4.tiny import TINY_0731_CONFIG, TINY_CONFIG
from headrace_engine.models.drafter import Drafts

Loaded = Callable[[str], Pair]
TEXT = random_tokens(40, seed=1)
CHUNKS = [1, 1, 3, 2, 1, 1, 14, 16]  # each ends where the oracle has drafted


def assert_same(found: Drafts, expected: Drafts) -> None:
    assert_close(found.logits.flatten(0, 1), expected.logits.flatten(0, 1))
    assert torch.equal(found.token_ids, expected.token_ids)
    if expected.confidences is None:
        assert found.confidences is None
    else:
        assert_close(found.confidences, expected.confidences)


def drafts_at(pair: Pair, end: int) -> Drafts:
    """After a prompt of `end` tokens of TEXT, run whole and alone."""
    run = DraftRun(*pair)
    return run.step([(run.sequence(), TEXT[:end], TEXT[end])])


def test_mtp_drafts_equal_nemo_automodels(loaded: Loaded) -> None:
    expected = load_file(EXPECTED)
    tokens = expected["tokens"].tolist()
    run = DraftRun(*loaded("v4"))
    sequence, end = run.sequence(), 0
    for size in CHUNKS:
        end += size
        drafts = run.step([(sequence, tokens[end - size : end], tokens[end])])
        assert_close(drafts.logits[:, 0], expected["v4.logits"][end - 1 : end], tolerance=1e-4)
        assert drafts.token_ids.tolist() == [[int(expected["v4.logits"][end - 1].argmax())]]


def test_dspark_drafts_equal_nemo_automodels(loaded: Loaded) -> None:
    expected = load_file(EXPECTED)
    tokens, anchors = expected["tokens"].tolist(), expected["v41.anchors"].tolist()
    assert anchors == torch.tensor(CHUNKS).cumsum(0).tolist()
    run = DraftRun(*loaded("v41"))
    sequence = run.sequence()
    for number, (size, anchor) in enumerate(zip(CHUNKS, anchors, strict=True)):
        drafts = run.step([(sequence, tokens[anchor - size : anchor], tokens[anchor])])
        assert_close(drafts.logits[0], expected["v41.logits"][number], tolerance=1e-4)
        assert torch.equal(drafts.token_ids[0], expected["v41.drafts"][number])
        assert drafts.confidences is not None
        assert_close(drafts.confidences, expected["v41.confidences"][number : number + 1])


@pytest.fixture(scope="module")
def entered(loaded: Loaded) -> list[torch.Tensor]:
    """[tokens, N, hidden] of DeepSeek-V4 for TEXT: the streams that enter each layer, and those at the end."""
    model, _ = loaded("v4")
    found: list[torch.Tensor] = []
    run = PagedRun(model)
    model.forward(
        run.batch([(run.sequence(40), TEXT)]),
        run.cache,
        run.exchange,
        lambda entry, streams: found.append(streams.clone()),
    )
    return found


@pytest.mark.parametrize("end", [1, 2, 7, 8, 9, 16, 39])
def test_dspark_of_v4_equals_the_plain_reference(
    loaded: Loaded, folder_of: Callable[[str], Path], entered: list[torch.Tensor], end: int
) -> None:
    weights = load_file(folder_of("v4-0731") / "model.safetensors")
    means = torch.cat([entered[layer + 1].mean(dim=1) for layer in TINY_0731_CONFIG["dspark_target_layer_ids"]], dim=1)
    markov = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
    drafted = DsparkReference(Generation(TINY_0731_CONFIG), weights, markov).draft(means[:end], TEXT[end])
    found = drafts_at(loaded("v4-0731"), end)
    assert_close(found.logits[0], drafted.logits.float(), tolerance=1e-4)
    assert found.token_ids[0].tolist() == drafted.tokens
    assert found.confidences is not None
    assert found.confidences[0].tolist() == pytest.approx(drafted.confidences, abs=1e-5)


@pytest.mark.parametrize("end", [1, 7, 20])
def test_further_mtp_drafts_read_the_layers_own_streams(
    loaded: Loaded, folder_of: Callable[[str], Path], entered: list[torch.Tensor], end: int
) -> None:
    model, _ = loaded("v4")
    three = models.load_drafter(folder_of("v4"), model, num_drafts=3)
    weights = load_file(folder_of("v4") / "model.safetensors")
    reference = MtpReference(TINY_CONFIG, weights)
    drafted = reference.draft(entered[-1][:end], TEXT[1 : end + 1], 3)
    found = drafts_at((model, three), end)
    assert_close(found.logits[0], drafted.logits.float(), tolerance=1e-4)
    assert found.token_ids[0].tolist() == drafted.tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_one_batch_of_prompts_and_answers_drafts_as_each_alone(loaded: Loaded, family: str) -> None:
    pair, rng = loaded(family), random.Random(family)
    run = DraftRun(*pair, seed=5)
    sequences = [run.sequence() for _ in range(4)]
    for _ in range(8):
        parts = []
        for sequence in rng.sample(sequences, 3):
            end = min(sequence.length + rng.choice([1, 1, 2, 9]), len(TEXT) - 1)
            if end > sequence.length:
                parts.append((sequence, TEXT[sequence.length : end], TEXT[end]))
        wanted = rng.sample(range(len(parts)), 2)
        drafts = run.step(parts, wanted)
        alone = drafts_at(pair, parts[wanted[1]][0].length)
        assert_close(drafts.logits[1], alone.logits[0])


@pytest.mark.parametrize("num_accepted", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_that_are_not_accepted_leave_no_trace(loaded: Loaded, family: str, num_accepted: int) -> None:
    pair = loaded(family)
    run = DraftRun(*pair)
    sequence = run.sequence()
    run.step([(sequence, TEXT[:13], TEXT[13])])
    tokens = TEXT[13 : 13 + num_accepted] + [7] * (5 - num_accepted)
    end = 13 + num_accepted
    assert_same(run.verify(sequence, tokens, num_accepted, TEXT[end]), drafts_at(pair, end))
    assert_same(run.step([(sequence, TEXT[end : end + 9], TEXT[end + 9])]), drafts_at(pair, end + 9))


def test_further_mtp_drafts_leave_no_trace(loaded: Loaded, folder_of: Callable[[str], Path]) -> None:
    model, one = loaded("v4")
    run = DraftRun(model, models.load_drafter(folder_of("v4"), model, num_drafts=4))
    sequence = run.sequence()
    for end in range(1, 20):
        drafts = run.step([(sequence, TEXT[end - 1 : end], TEXT[end])])
        if end in (3, 9, 19):
            assert_close(drafts.logits[:, 0], drafts_at((model, one), end).logits[:, 0])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_main_cache_of_packed_records_gives_the_drafts_of_rounded_entries(
    folder_of: Callable[[str], Path], family: str
) -> None:
    made = []
    for cache_dtype in ("float32", "fp4"):
        model = models.load(folder_of(family), cache_dtype=cache_dtype, fake_quantization="cache")
        run = DraftRun(model, models.load_drafter(folder_of(family), model))
        sequence = run.sequence()
        steps = [(TEXT[:13], TEXT[13]), (TEXT[13:14], TEXT[14])]
        made.append(torch.cat([run.step([(sequence, tokens, last)]).logits for tokens, last in steps]))
    assert torch.equal(*made)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_drafters_cache_matters(loaded: Loaded, family: str) -> None:
    pair = loaded(family)
    run = DraftRun(*pair)
    sequence = run.sequence()
    run.step([(sequence, TEXT[:13], TEXT[13])])
    for tensor in run.cache.values():
        tensor[sequence.slot] = 0
    drafts = run.step([(sequence, TEXT[13:14], TEXT[14])])
    assert float((drafts.logits - drafts_at(pair, 14).logits).abs().max()) > 1e-2
