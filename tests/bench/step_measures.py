"""The rows and columns of `make bench-steps`, and how a step of ours is timed."""

from __future__ import annotations

import statistics

from tests.bench.report import Cell, Results
from tests.bench.stepping import Stepper
from tests.bench.timing import seconds_of

V4, V41, TRANSFORMERS, NEMO = "V4", "V4.1", "transformers, V4", "NeMo AutoModel, V4.1"
PEERS = {V4: TRANSFORMERS, V41: NEMO}
DECODE_CONTEXT = 128  # tokens before a decode step, as in `make bench`
CHUNK = 2048  # tokens of a prefill step
STEPS = 10  # decode steps of one measurement


def prefill_cell(num_tokens: int) -> Cell:
    return Cell(f"prefill of {num_tokens}", "tok/s", higher_is_better=True)


def decode_cell(batch: int, context: int = DECODE_CONTEXT) -> Cell:
    return Cell(f"decode step, {batch} at {context}", "ms", higher_is_better=False)


def next_token_cell(batch: int, num_tokens: int) -> Cell:
    """What the token costs that is the last of `num_tokens`."""
    return Cell(f"decode step, {batch} to {num_tokens} (NeMo: whole forward)", "ms", higher_is_better=False)


def part_cell(what: str, part: str) -> Cell:
    return Cell(f"{what}: {part}", "%", higher_is_better=False)


def measure_prefill(results: Results, name: str, stepper: Stepper, num_tokens: int) -> None:
    took = seconds_of(lambda: stepper.prefill(num_tokens, CHUNK))
    results.add(prefill_cell(num_tokens), name, num_tokens / took)


def measure_decode(results: Results, name: str, stepper: Stepper, batch: int, context: int, cell: Cell) -> None:
    stepper.decode(batch, context)
    times = [seconds_of(lambda: stepper.decode(batch, context)) for _ in range(STEPS)]
    results.add(cell, name, 1e3 * statistics.median(times))
