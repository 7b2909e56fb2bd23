"""What a step of the model itself costs, without server and scheduler: `make bench-steps`.

Prefill of a long prompt in chunks, decode at several batch sizes, where the time goes, and how a decode step grows with
the context. DeepSeek-V4 is the benchmark model of `tests.bench.checkpoint`, DeepSeek-V4.1 is one of like size. Beside
them, in the same run, independent implementations: transformers' V4, and NeMo AutoModel's V4.1 where it is installed,
whose logits are compared with ours. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tests.bench.nemo_peer import HOW_TO_INSTALL, NemoModel
from tests.bench.report import Results, table, write_json
from tests.bench.run import model_directory, numbers, say
from tests.bench.step_measures import (
    CHUNK,
    DECODE_CONTEXT,
    NEMO,
    PEERS,
    STEPS,
    TRANSFORMERS,
    V4,
    V41,
    decode_cell,
    measure_decode,
    measure_prefill,
    part_cell,
)
from tests.bench.step_peers import Transformers, compare_with_nemo, measure_beside_nemo
from tests.bench.stepping import Stepper, Stopwatch
from tests.bench.timing import seconds_of
from tests.bench.v41_model import v41_directory
from tests.reference import nemo

from headrace_engine import models

PROMPT = 8192  # tokens
COMPARED = 1024  # tokens of the prompt whose logits are compared
DTYPE = "bfloat16"


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


def measure_ours(results: Results, name: str, stepper: Stepper, arguments: argparse.Namespace) -> None:
    measure_prefill(results, name, stepper, PROMPT)
    for batch in arguments.batches:
        measure_decode(results, name, stepper, batch, DECODE_CONTEXT, decode_cell(batch))
    for context in arguments.contexts:
        measure_decode(results, name, stepper, 1, context, decode_cell(1, context))


def compare(results: Results, folder: Path, ours: Stepper, theirs: NemoModel, num_threads: int) -> None:
    """The logits of one prompt, ours and NeMo AutoModel's, in the measured dtype and in fp32."""
    rng = random.Random("prompt")
    tokens = [rng.randrange(10, 250) for _ in range(COMPARED)]
    exact = Stepper(models.load(folder, dtype="float32"), COMPARED, 1)
    with NemoModel(folder, "float32", num_threads) as exact_peer:
        peers = {"float32": exact_peer.logits(tokens), DTYPE: theirs.logits(tokens)}
    compare_with_nemo(
        results, {"float32": exact.prompt_logits(tokens), DTYPE: ours.prompt_logits(tokens).float()}, peers
    )


def open_nemo(stack: contextlib.ExitStack, arguments: argparse.Namespace, folder: Path) -> NemoModel | None:
    if arguments.skip_nemo:
        return None
    if not nemo.is_installed():
        say(HOW_TO_INSTALL)
        return None
    say(f"{NEMO}: starting")
    return stack.enter_context(NemoModel(folder, DTYPE, arguments.threads))


def measure_all(arguments: argparse.Namespace, results: Results) -> None:
    directories = {V4: model_directory(), V41: v41_directory()}
    steppers = {
        name: Stepper(models.load(folder, dtype=DTYPE), max(arguments.contexts), max(arguments.batches))
        for name, folder in directories.items()
    }
    transformers = None if arguments.skip_transformers else Transformers(directories[V4])
    for name, stepper in steppers.items():
        say(f"{name}: first steps")
        stepper.prefill(CHUNK, CHUNK)
    with contextlib.ExitStack() as stack:
        peer = open_nemo(stack, arguments, directories[V41])
        if peer is not None:
            say(f"{NEMO}: the same prompt as ours")
            compare(results, directories[V41], steppers[V41], peer, arguments.threads)
        note_peers(results, transformers, peer)
        for repetition in range(arguments.repetitions):
            turn = f"{repetition + 1} of {arguments.repetitions}"
            for name, stepper in steppers.items():
                say(f"{name}, {turn}")
                measure_ours(results, name, stepper, arguments)
            if transformers is not None:
                say(f"{TRANSFORMERS}, {turn}")
                transformers.measure(results, arguments.batches, arguments.transformers_prompt)
                measure_prefill(results, V4, steppers[V4], arguments.transformers_prompt)
            if peer is not None:
                say(f"{NEMO}, {turn}")
                measure_beside_nemo(results, steppers[V41], peer, arguments.batches, arguments.nemo_prompts)
    for name, stepper in steppers.items():
        measure_parts(results, name, stepper, arguments.batches)


def note_peers(results: Results, transformers: Transformers | None, peer: NemoModel | None) -> None:
    """What the peers are, for the JSON file."""
    if transformers is not None:
        results.servers[TRANSFORMERS] = {"versions": {"transformers": version("transformers")}, "has_cache": True}
    if peer is not None:
        results.servers[NEMO] = {"versions": peer.versions, "has_cache": False}
    elif not nemo.is_installed():
        results.servers[NEMO] = {"absent": HOW_TO_INSTALL}


def ratios(results: Results, name: str) -> dict[str, float]:
    """How many times better ours is than its peer, by cell: where both were measured."""
    found = {
        cell.name: results.ratio(cell, name, PEERS[name]) for cell in results.cells if cell.unit in ("tok/s", "ms")
    }
    return {cell: ratio for cell, ratio in found.items() if ratio}


def report_ratios(results: Results) -> None:
    """On stdout, and for the JSON file."""
    for name, peer in PEERS.items():
        found = ratios(results, name)
        if found:
            print(f"\n{name} against {peer}:", ", ".join(f"{cell} {ratio:.1f}x" for cell, ratio in found.items()))
            results.servers[name] = {"peer": peer, "times_better_than_peer": found}
        elif "absent" in results.servers.get(peer, {}):
            print(f"\n{results.servers[peer]['absent']}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.steps", description=__doc__)
    parser.add_argument("--threads", type=int, default=2, help="threads of the model")
    parser.add_argument("--batches", type=numbers, default=numbers("1,8,32"), help="sequences of a decode step")
    parser.add_argument("--contexts", type=numbers, default=numbers("1024,8192,32768,65536,131072"), help="tokens")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--transformers-prompt", type=int, default=1024, help="tokens; it needs much memory for more")
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument(
        "--nemo-prompts",
        type=numbers,
        default=numbers("512,1024,2048"),
        help="tokens; its memory grows with their square",
    )
    parser.add_argument("--skip-nemo", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("bench-results/steps.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = Results()
    measure_all(arguments, results)
    columns = [name for name in (V4, TRANSFORMERS, V41, NEMO) if any(server == name for _, server in results.values)]
    print(table(results, columns, None))
    report_ratios(results)
    settings = {name: value for name, value in vars(arguments).items() if name != "output"}
    write_json(arguments.output, results, json.loads(json.dumps(settings)), None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
