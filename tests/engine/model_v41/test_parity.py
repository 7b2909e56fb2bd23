"""The forward against the plain reference and its oracle, in fp32, however tokens are cut into steps and batches."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.engine.model.harness import PagedRun, Sequence, assert_close, random_tokens
from tests.engine.model_v41.conftest import Expected
from tests.reference.deepseek_v41 import token_map
from tests.reference.v41_cases import CASES, EXPECTED, make_tokenizer, write_case

from headrace_engine import models
from headrace_engine.models.deepseek_v41.model import DeepseekV41

TEXT = random_tokens(50, seed=1)
OTHER = random_tokens(50, seed=2)


@pytest.mark.parametrize("chunks", [[61], [5, 1]], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_nemo_automodels(name: str, chunks: list[int], tmp_path: Path) -> None:
    write_case(tmp_path, name, len(set(token_map(make_tokenizer()))))
    stored = load_file(EXPECTED)
    model = models.load(tmp_path)
    run = PagedRun(model, block_size=24, num_blocks=8)  # a multiple of every case's ratios
    assert_close(run.prompt(stored[f"{name}.tokens"].tolist(), chunks), stored[f"{name}.logits"], tolerance=1e-4)


def test_prompts_of_every_length_around_window_group_and_candidate_boundaries(
    model: DeepseekV41, expected: Expected
) -> None:
    run = PagedRun(model)
    for length in [*range(1, 30), 49, 50]:
        assert_close(run.prompt(TEXT[:length]), expected(TEXT)[:length])


@pytest.mark.parametrize("chunks", [[1], [3], [8], [13], [5, 1, 1, 8, 2, 13]], ids=str)
def test_chunked_prefill_equals_one_shot(model: DeepseekV41, expected: Expected, chunks: list[int]) -> None:
    assert_close(PagedRun(model).prompt(TEXT, chunks), expected(TEXT))


def test_decode_after_prompts_of_every_residue_in_one_batch(model: DeepseekV41, expected: Expected) -> None:
    run = PagedRun(model)
    texts = [(TEXT if length % 2 else OTHER)[: length + 16] for length in range(13, 25)]
    sequences = [run.sequence(len(text)) for text in texts]
    outputs = [[logits] for logits in run.step([(s, text[:-16]) for s, text in zip(sequences, texts, strict=True)])]
    for step in range(-16, 0):
        parts = [(s, [text[step]]) for s, text in zip(sequences, texts, strict=True)]
        for output, row in zip(outputs, run.step(parts), strict=True):
            output.append(row)
    for text, output in zip(texts, outputs, strict=True):
        assert_close(torch.cat(output), expected(TEXT if text[0] == TEXT[0] else OTHER)[: len(text)])


@pytest.mark.parametrize("seed", range(2))
def test_random_schedules_of_prefill_and_decode_in_one_batch(model: DeepseekV41, expected: Expected, seed: int) -> None:
    """Sequences come, advance by random chunks in random order, end, and others take their slots and blocks over."""
    rng = random.Random(seed)
    run = PagedRun(model, num_blocks=40, num_slots=6, seed=seed)
    waiting = [rng.choice((TEXT, OTHER))[: rng.randrange(1, 51)] for _ in range(8)]
    live: list[tuple[Sequence, list[int]]] = []
    while waiting or live:
        while waiting and len(live) < 4:
            text = waiting.pop()
            live.append((run.sequence(len(text)), text))
        chosen = rng.sample(live, rng.randrange(1, len(live) + 1))
        sizes = [rng.choice([1, 1, 1, 2, 3, 8, 17]) for _ in chosen]
        parts = [(s, text[s.length : s.length + n]) for (s, text), n in zip(chosen, sizes, strict=True)]
        firsts = [s.length for s, _ in chosen]
        for (sequence, text), first, logits in zip(chosen, firsts, run.step(parts), strict=True):
            whole = expected(TEXT if text[0] == TEXT[0] else OTHER)
            assert_close(logits, whole[first : sequence.length])
            if sequence.length == len(text):
                run.release(sequence)
                live.remove((sequence, text))


@pytest.mark.parametrize("shared", [7, 8, 16, 31, 32])
def test_a_prefix_is_resumed_from_its_blocks_and_a_copy_of_its_state(
    model: DeepseekV41, expected: Expected, shared: int
) -> None:
    text = TEXT[:shared] + OTHER[:12]
    run = PagedRun(model)
    donor = run.sequence(64)
    run.step([(donor, TEXT[:shared])])
    heir = run.sequence(64)
    heir.blocks[: -(-shared // 8)] = donor.blocks[: -(-shared // 8)]
    heir.length, heir.token_ids = shared, list(TEXT[:shared])
    for group in model.cache_groups:
        if group.kind == "state":
            run.cache[group.name][heir.slot] = run.cache[group.name][donor.slot]
    run.release(donor)
    outputs = run.step([(heir, text[shared : shared + 5])]) + run.step([(heir, text[shared + 5 :])])
    assert_close(torch.cat(outputs), expected(text)[shared:])


@pytest.mark.parametrize("length", [14, 15, 30, 31])
def test_setting_the_length_back_takes_a_token_back(model: DeepseekV41, expected: Expected, length: int) -> None:
    text = TEXT[:length] + OTHER[length : length + 8]
    run = PagedRun(model)
    sequence = run.sequence(64)
    run.step([(sequence, TEXT[:length])])
    run.step([(sequence, TEXT[length : length + 1])])
    sequence.length = length
    outputs = [run.step([(sequence, [token])])[0] for token in text[length:]]
    assert_close(torch.cat(outputs), expected(text)[length:])


@pytest.mark.parametrize("group", ["window", "kv_1", "kv_2", "index_1", "index_2", "carry_2"])
def test_every_group_of_the_cache_matters_to_what_follows(model: DeepseekV41, expected: Expected, group: str) -> None:
    run = PagedRun(model)
    sequence = run.sequence(64)
    run.step([(sequence, TEXT[:41])])  # odd: a token is carried
    run.cache[group][sequence.slot if group in ("window", "carry_2") else sequence.blocks] = 0
    outputs = [run.step([(sequence, [token])])[0] for token in TEXT[41:49]]
    assert float((torch.cat(outputs) - expected(TEXT)[41:49]).abs().max()) > 1e-2


def test_all_groups_are_tested_above(model: DeepseekV41) -> None:
    assert {group.name for group in model.cache_groups} == {"window", "kv_1", "kv_2", "index_1", "index_2", "carry_2"}


def test_a_step_without_tokens_touches_nothing(model: DeepseekV41) -> None:
    run = PagedRun(model)
    assert run.step([]) == []
    assert all(bool(tensor.isnan().all()) for tensor in run.cache.values())


def test_only_the_wanted_rows_get_logits(model: DeepseekV41, expected: Expected) -> None:
    run = PagedRun(model)
    batch = run.batch([(run.sequence(20), TEXT[:20])])
    batch.logit_rows = torch.tensor([19, 3])
    assert_close(model.forward(batch, run.cache, run.exchange), expected(TEXT)[[19, 3]])


def test_a_batch_without_the_tokens_before_it_is_refused(model: DeepseekV41) -> None:
    run = PagedRun(model)
    batch = run.batch([(run.sequence(4), TEXT[:4])])
    batch.previous_ids = None
    with pytest.raises(ValueError, match="previous_ids"):
        model.forward(batch, run.cache, run.exchange)


@pytest.mark.slow
def test_a_long_prompt_in_long_chunks(model: DeepseekV41, expected: Expected) -> None:
    tokens = random_tokens(600, seed=5)
    run = PagedRun(model, num_blocks=80)
    assert_close(run.prompt(tokens, [256, 1]), expected(tokens), tolerance=2e-4)
