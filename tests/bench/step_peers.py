"""Independent implementations of the same models: what they take for the same steps, and that it is the same work."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from tests.bench.report import Cell, Results
from tests.bench.step_measures import (
    DECODE_CONTEXT,
    NEMO,
    TRANSFORMERS,
    V41,
    decode_cell,
    measure_decode,
    measure_prefill,
    next_token_cell,
    prefill_cell,
)
from tests.bench.stepping import Stepper
from tests.bench.timing import seconds_of

Logits = Mapping[str, torch.Tensor]  # fp32 [tokens, vocab] by the dtype they were computed in


class NemoPeer(Protocol):
    def forward_seconds(self, batch: int, num_tokens: int) -> float: ...


class Transformers:
    """DeepSeek-V4, eager, in our dtype, with a cache."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def measure(self, results: Results, batches: Sequence[int], prompt: int) -> None:
        for batch in batches:
            tokens = torch.randint(10, 250, (batch, DECODE_CONTEXT))
            cache = self._model(tokens, use_cache=True).past_key_values
            step = partial(self._model, tokens[:, :1], past_key_values=cache, use_cache=True)
            times = [seconds_of(step) for _ in range(3)]
            results.add(decode_cell(batch), TRANSFORMERS, 1e3 * statistics.median(times))
        if prompt:
            took = seconds_of(lambda: self._model(torch.randint(10, 250, (1, prompt)), use_cache=True))
            results.add(prefill_cell(prompt), TRANSFORMERS, prompt / took)


def measure_beside_nemo(
    results: Results, ours: Stepper, theirs: NemoPeer, batches: Sequence[int], prompts: Sequence[int]
) -> None:
    """One forward of a prompt is its prefill, and what the peer, which has no cache, needs for the prompt's last token.

    Ours takes its turn after each of them.
    """
    for num_tokens in prompts:
        took = theirs.forward_seconds(1, num_tokens)
        results.add(prefill_cell(num_tokens), NEMO, num_tokens / took)
        results.add(next_token_cell(1, num_tokens), NEMO, 1e3 * took)
        measure_prefill(results, V41, ours, num_tokens)
        measure_decode(results, V41, ours, 1, num_tokens - 1, next_token_cell(1, num_tokens))
    for batch in batches:
        cell = next_token_cell(batch, DECODE_CONTEXT)
        results.add(cell, NEMO, 1e3 * theirs.forward_seconds(batch, DECODE_CONTEXT))
        measure_decode(results, V41, ours, batch, DECODE_CONTEXT - 1, cell)


def compare_with_nemo(results: Results, ours: Logits, theirs: Logits) -> None:
    """Logits [tokens, vocab] of one prompt, by dtype. In fp32 both must say the same, in the other one both round."""
    for dtype, logits in theirs.items():
        results.add(_share_cell(f"best token as ours, {dtype}"), NEMO, 100 * same_best(ours[dtype], logits))
    largest = (ours["float32"] - theirs["float32"]).abs().max()
    results.add(
        Cell("largest difference of a logit, float32", "1e-6", higher_is_better=False), NEMO, 1e6 * largest.item()
    )
    for name, found in ((V41, ours), (NEMO, theirs)):
        for dtype in found.keys() - {"float32"}:
            results.add(
                _share_cell(f"best token in {dtype} as in float32"),
                name,
                100 * same_best(found[dtype], found["float32"]),
            )


def _share_cell(name: str) -> Cell:
    return Cell(name, "%", higher_is_better=True)


def same_best(one: torch.Tensor, other: torch.Tensor) -> float:
    """The share of positions with the same best token, of logits [tokens, vocab]."""
    if one.shape != other.shape:
        raise ValueError(f"logits of shapes {tuple(one.shape)} and {tuple(other.shape)} are not of the same work")
    return (one.argmax(-1) == other.argmax(-1)).float().mean().item()
