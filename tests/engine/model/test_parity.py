"""The forward against transformers, in fp32, whatever way the tokens are cut into steps and batches."""

from __future__ import annotations

import random

import pytest
import torch
from tests.engine.model.harness import PagedRun, assert_close, random_tokens, reference_logits

from headrace_engine.models.deepseek_v4.model import DeepseekV4


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 130, 200])
def test_prefill_logits_of_every_position(model: DeepseekV4, reference: torch.nn.Module, length: int) -> None:
    tokens = random_tokens(length, seed=length)
    assert_close(PagedRun(model).prompt(tokens), reference_logits(reference, tokens))


@pytest.mark.parametrize(
    "chunks", [[1], [3], [4], [5], [7], [8], [13], [40], [1, 2], [40, 1, 3], [5, 1, 1, 8, 2, 13]], ids=str
)
def test_chunked_prefill_equals_one_shot(model: DeepseekV4, reference: torch.nn.Module, chunks: list[int]) -> None:
    tokens = random_tokens(101, seed=1)
    assert_close(PagedRun(model).prompt(tokens, chunks), reference_logits(reference, tokens))


def test_decode_after_a_prompt_of_every_residue(model: DeepseekV4, reference: torch.nn.Module) -> None:
    """16 prompts of 17..32 tokens, then 64 steps of one token each, all sequences in one batch."""
    run = PagedRun(model, num_blocks=300)
    texts = [random_tokens(length + 64, seed=length) for length in range(17, 33)]
    sequences = [run.sequence(len(text)) for text in texts]
    prompts = run.step([(s, text[:-64]) for s, text in zip(sequences, texts, strict=True)])
    outputs = [[logits] for logits in prompts]
    for step in range(-64, 0):
        logits = run.step([(s, [text[step]]) for s, text in zip(sequences, texts, strict=True)])
        for output, row in zip(outputs, logits, strict=True):
            output.append(row)
    for text, output in zip(texts, outputs, strict=True):
        assert_close(torch.cat(output), reference_logits(reference, text))


def test_greedy_tokens_equal_transformers_own_cached_generation(model: DeepseekV4, reference: torch.nn.Module) -> None:
    for length in (5, 24):
        prompt = random_tokens(length, seed=100 + length)
        generated = reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, length), max_new_tokens=12, do_sample=False
        )[0, length:].tolist()
        run = PagedRun(model)
        sequence = run.sequence(length + len(generated))
        tokens = [int(run.step([(sequence, prompt)])[0][-1].argmax())]
        while len(tokens) < len(generated):
            tokens.append(int(run.step([(sequence, tokens[-1:])])[0][-1].argmax()))
        assert tokens == generated


def test_a_batch_of_32_different_prompts_equals_each_alone(model: DeepseekV4, reference: torch.nn.Module) -> None:
    run = PagedRun(model, num_blocks=400)
    texts = [random_tokens(length, seed=200 + length) for length in range(1, 65, 2)]
    batch = run.step([(run.sequence(len(text)), text) for text in texts])
    for text, logits in zip(texts, batch, strict=True):
        assert_close(logits, reference_logits(reference, text))


@pytest.mark.parametrize("seed", range(2))
def test_random_schedules_of_prefill_and_decode_in_one_batch(
    model: DeepseekV4, reference: torch.nn.Module, seed: int
) -> None:
    """Sequences come, advance by random chunks (often single tokens) in random order, end, and others take their
    slots and blocks over without anything being cleared."""
    rng = random.Random(seed)
    run = PagedRun(model, num_blocks=64, num_slots=6, seed=seed)
    texts = [random_tokens(rng.randrange(1, 90), seed=1000 * seed + i) for i in range(16)]
    waiting, live, done = list(range(len(texts))), {}, {}
    while waiting or live:
        while waiting and len(live) < 5:
            index = waiting.pop()
            live[index] = (run.sequence(len(texts[index])), [])
        chosen = rng.sample(sorted(live), rng.randrange(1, len(live) + 1))
        parts = []
        for index in chosen:
            sequence = live[index][0]
            size = rng.choice([1, 1, 1, 2, 3, 8, 17])
            parts.append((sequence, texts[index][sequence.length : sequence.length + size]))
        for index, logits in zip(chosen, run.step(parts), strict=True):
            sequence, outputs = live[index]
            outputs.append(logits)
            if sequence.length == len(texts[index]):
                done[index] = torch.cat(outputs)
                run.release(sequence)
                del live[index]
    for index, logits in done.items():
        assert_close(logits, reference_logits(reference, texts[index]))


def test_a_larger_block_changes_nothing(model: DeepseekV4, reference: torch.nn.Module) -> None:
    tokens = random_tokens(77, seed=3)
    run = PagedRun(model, block_size=32)
    assert_close(run.prompt(tokens, [13, 1]), reference_logits(reference, tokens))


def test_a_step_without_tokens_touches_nothing(model: DeepseekV4) -> None:
    run = PagedRun(model)
    assert run.step([]) == []
    assert all(bool(tensor.isnan().all()) for tensor in run.cache.values())


def test_only_the_wanted_rows_get_logits(model: DeepseekV4) -> None:
    run = PagedRun(model)
    tokens = random_tokens(20, seed=4)
    every = run.prompt(tokens)
    batch = run.batch([(run.sequence(20), tokens)])
    batch.logit_rows = torch.tensor([19, 3])
    assert_close(model.forward(batch, run.cache, run.exchange), every[[19, 3]], tolerance=1e-5)


@pytest.mark.slow
def test_a_long_prompt_in_long_chunks(model: DeepseekV4, reference: torch.nn.Module) -> None:
    tokens = random_tokens(2000, seed=5)
    run = PagedRun(model, num_blocks=260)
    assert_close(run.prompt(tokens, [512, 1]), reference_logits(reference, tokens), tolerance=2e-4)
