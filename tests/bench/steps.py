"""What a step of the model itself costs, without server and scheduler: `make bench-steps`.

Prefill of a long prompt in chunks, decode at several batch sizes, where the time goes, and how a decode step grows with
the context. DeepSeek-V4 is the benchmark model of `tests.bench.checkpoint`, with transformers' own model beside it in
the same run; DeepSeek-V4.1 is one of like size. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.bench.report import Cell, Results, table, write_json
from tests.bench.run import model_directory, numbers, say
from tests.bench.stepping import Stepper, Stopwatch
from tests.bench.timing import seconds_of
from tests.bench.v41_model import v41_directory

from headrace_engine import models

CHUNK = 2048  # tokens of a prefill step
STEPS = 10  # decode steps of one measurement
PROMPT = 8192  # tokens
DECODE_CONTEXT = 128  # tokens before a decode step, as in `make bench`
V4, V41, TRANSFORMERS = "V4", "V4.1", "transformers, V4"


def prefill_cell(num_tokens: int) -> Cell:
    return Cell(f"prefill of {num_tokens}", "tok/s", higher_is_better=True)


def decode_cell(batch: int, context: int = DECODE_CONTEXT) -> Cell:
    return Cell(f"decode step, {batch} at {context}", "ms", higher_is_better=False)


def part_cell(what: str, part: str) -> Cell:
    return Cell(f"{what}: {part}", "%", higher_is_better=False)


def measure_prefill(results: Results, name: str, stepper: Stepper, num_tokens: int) -> None:
    took = seconds_of(lambda: stepper.prefill(num_tokens, CHUNK))
    results.add(prefill_cell(num_tokens), name, num_tokens / took)


def measure_decode(results: Results, name: str, stepper: Stepper, batch: int, context: int) -> None:
    stepper.decode(batch, context)
    times = [seconds_of(lambda: stepper.decode(batch, context)) for _ in range(STEPS)]
    results.add(decode_cell(batch, context), name, 1e3 * statistics.median(times))


def measure_parts(results: Results, name: str, stepper: Stepper, batches: Sequence[int]) -> None:
    """Shares of one step's time; what is in no part is Python, and torch between kernels."""
    steps: list[tuple[str, Callable[[], Any]]] = [("prefill", lambda: stepper.prefill(PROMPT, CHUNK))]
    steps += [(f"decode of {batch}", lambda batch=batch: stepper.decode(batch, DECODE_CONTEXT)) for batch in batches]
    for what, step in steps:
        repeat = 1 if what == "prefill" else STEPS
        with Stopwatch() as stopwatch:
            total = seconds_of(lambda step=step, repeat=repeat: [step() for _ in range(repeat)])
        for part, share in stopwatch.shares(total).items():
            results.add(part_cell(what, part), name, 100 * share)


class Transformers:
    """The independent implementation, eager, in the same dtype."""

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


def measure_all(arguments: argparse.Namespace, results: Results) -> None:
    directories = {V4: model_directory(), V41: v41_directory()}
    steppers = {
        name: Stepper(models.load(folder, dtype="bfloat16"), max(arguments.contexts), max(arguments.batches))
        for name, folder in directories.items()
    }
    peer = None if arguments.skip_transformers else Transformers(directories[V4])
    for name, stepper in steppers.items():
        say(f"{name}: first steps")
        stepper.prefill(CHUNK, CHUNK)
    for repetition in range(arguments.repetitions):
        for name, stepper in steppers.items():
            say(f"{name}, {repetition + 1} of {arguments.repetitions}")
            measure_prefill(results, name, stepper, PROMPT)
            for batch in arguments.batches:
                measure_decode(results, name, stepper, batch, DECODE_CONTEXT)
            for context in arguments.contexts:
                measure_decode(results, name, stepper, 1, context)
        if peer is not None:
            say(f"{TRANSFORMERS}, {repetition + 1} of {arguments.repetitions}")
            peer.measure(results, arguments.batches, arguments.transformers_prompt)
            measure_prefill(results, V4, steppers[V4], arguments.transformers_prompt)
    for name, stepper in steppers.items():
        measure_parts(results, name, stepper, arguments.batches)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.steps", description=__doc__)
    parser.add_argument("--threads", type=int, default=2, help="threads of the model")
    parser.add_argument("--batches", type=numbers, default=numbers("1,8,32"), help="sequences of a decode step")
    parser.add_argument("--contexts", type=numbers, default=numbers("1024,8192,32768,65536,131072"), help="tokens")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--transformers-prompt", type=int, default=1024, help="tokens; it needs much memory for more")
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("bench-results/steps.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = Results()
    measure_all(arguments, results)
    print(table(results, [V4, TRANSFORMERS, V41], None))
    ratios = {
        cell.name: results.ratio(cell, V4, TRANSFORMERS)
        for cell in results.cells
        if (cell.name, TRANSFORMERS) in results.values
    }
    print("\nV4 against transformers:", ", ".join(f"{name} {ratio:.1f}x" for name, ratio in ratios.items() if ratio))
    settings = {name: value for name, value in vars(arguments).items() if name != "output"}
    write_json(arguments.output, results, json.loads(json.dumps(settings)), None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
