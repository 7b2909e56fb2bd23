"""Do the tests of DeepSeek-V4.1 notice a wrong formula? Breaks each in turn and prints which test fails first.

    python -m tests.reference.v41_mutations [WORD ...]        (only those whose description has one of the words)

Every mutation is a change of one place in a copy of the engine, run on the torch references of the kernels, so that
nothing is compiled. Exits with 1 if one that should be seen is not.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "engine" / "headrace_engine"
TESTS = "tests/engine/model_v41/test_parity.py"
LIMIT_SECONDS = 300


@dataclass(frozen=True)
class Mutation:
    what: str
    file: str
    old: str
    new: str
    can_be_seen: bool = True


_V41 = "models/deepseek_v41/"
_MIX, _ATTENTION = "kernels/hyper_connection.py", "kernels/shared_kv_attention.py"

MUTATIONS = [
    Mutation(
        "rope turns the two halves instead of adjacent pairs",
        "kernels/norm_rope.py",
        ".view(*x.shape[:-1], cos.shape[-1], 2)",
        ".view(*x.shape[:-1], 2, cos.shape[-1]).transpose(-1, -2)",
    ),
    Mutation("output is not turned back", _ATTENTION, "return rotate(out, cos, sin, inverse=True)", "return out"),
    Mutation(
        "entries turn at their last token",
        _V41 + "step.py",
        "step_rope(each.first_positions,",
        "step_rope(each.first_positions + ratio - 1,",
    ),
    Mutation(
        "entries turn at their number", _V41 + "step.py", "step_rope(each.first_positions,", "step_rope(each.groups,"
    ),
    Mutation(
        "compressed layers turn with the window layers' theta",
        _V41 + "model.py",
        "True: frequencies(config.compressed_rope,",
        "True: frequencies(type(config.window_rope)(config.window_rope.theta, config.compressed_rope.yarn),",
    ),
    Mutation(
        "YaRN on window-only layers",
        _V41 + "model.py",
        "False: frequencies(config.window_rope,",
        "False: frequencies(type(config.window_rope)(config.window_rope.theta, config.compressed_rope.yarn),",
    ),
    Mutation(
        "no YaRN on compressed layers",
        _V41 + "model.py",
        "True: frequencies(config.compressed_rope,",
        "True: frequencies(type(config.window_rope)(config.compressed_rope.theta),",
    ),
    Mutation(
        "YaRN's temperature in the softmax scale",
        _V41 + "attention.py",
        "self.scale = config.head_dim**-0.5",
        "self.scale = config.head_dim**-0.5 * 1.2772588722239782**2",
    ),
    Mutation(
        "eps in post (1e-6 of a number of order 1)",
        _MIX,
        "post = 2 * torch.sigmoid(post * scale[1] + post_base)",
        "post = 2 * torch.sigmoid(post * scale[1] + post_base) + hc_eps",
        can_be_seen=False,
    ),
    Mutation(
        "Sinkhorn starts with rows",
        _MIX,
        "    comb = comb / (comb.sum(dim=-2, keepdim=True) + hc_eps)\n    for",
        "    comb = comb / (comb.sum(dim=-1, keepdim=True) + hc_eps)\n    for",
    ),
    Mutation("mixing matrix not transposed", _MIX, "torch.bmm(comb.transpose(1, 2),", "torch.bmm(comb,"),
    Mutation(
        "a site sums by its own pre",
        _MIX,
        "return rms_norm_reference(weighted_sum(pre, streams), norm_weight, rms_eps), post, comb, own_pre",
        "return rms_norm_reference(weighted_sum(own_pre, streams), norm_weight, rms_eps), post, comb, own_pre",
    ),
    Mutation(
        "the end takes the mean of the streams",
        _V41 + "model.py",
        "kernels.weighted_norm(streams[rows], residual.pre[rows],",
        "kernels.weighted_norm(streams[rows], torch.ones_like(residual.pre[rows]),",
    ),
    Mutation(
        "each head of q is normalised",
        _V41 + "attention.py",
        "kernels.head_norm_rope(q, rope.cos, rope.sin, None)\n        kv",
        "kernels.head_norm_rope(q, rope.cos, rope.sin, config.norm_eps)\n        kv",
    ),
    Mutation("no sink", _ATTENTION, "sink = sinks.view(1, -1, 1)", "sink = (sinks - 1e9).view(1, -1, 1)"),
    Mutation("a window without the query", _ATTENTION, "(distance >= 0)", "(distance > 0)"),
    Mutation("a window that is one longer", _ATTENTION, "(distance < window)", "(distance <= window)"),
    Mutation(
        "the bias is in the experts' weights",
        "kernels/routing.py",
        "weights = scores.gather(1, ids)",
        "weights = (scores if bias is None else scores + bias).gather(1, ids)",
    ),
    Mutation(
        "the shared expert is not clamped",
        "kernels/experts.py",
        "_swiglu(F.linear(x, w13), limit)",
        "_swiglu(F.linear(x, w13), 1e9)",
    ),
    Mutation(
        "the gate is clamped from below", "kernels/experts.py", "gate.clamp(max=limit)", "gate.clamp(-limit, limit)"
    ),
    Mutation(
        "index keys come from the rotated entry",
        _V41 + "attention.py",
        "        keys = kernels.linear(entries, compressor.w_key)\n",
        "        kernels.head_norm_rope(entries.unsqueeze(1), rope.cos, rope.sin, None)\n"
        "        keys = kernels.linear(entries, compressor.w_key)\n"
        "        kernels.head_norm_rope(entries.unsqueeze(1), rope.cos, -rope.sin, None)\n",
    ),
    Mutation(
        "layers read the first kv source of all",
        _V41 + "attention.py",
        ".index(config.kv_source(layer)) if self.ratio",
        ".index(config.kv_sources_of(self.ratio)[0]) if self.ratio",
    ),
    Mutation(
        "an open group's earlier tokens are forgotten",
        _V41 + "compressor.py",
        "torch.where(is_here, rows[sources.clamp(min=0)].float(), earlier)",
        "rows[sources.clamp(min=0)].float()",
    ),
    Mutation(
        "Reindex layers ignore candidates",
        _V41 + "attention.py",
        "step.blocks is not None and self.layer",
        "False and self.layer",
    ),
    Mutation(
        "the newest block is no candidate of its own",
        "kernels/indexer.py",
        "best.masked_fill(newest & (visible > 0), torch.inf)",
        "best",
    ),
    Mutation(
        "a block's score is its first entry's",
        "kernels/indexer.py",
        ".view(len(padded), -1, run_size).amax(dim=2)",
        ".view(len(padded), -1, run_size)[:, :, 0]",
    ),
    Mutation(
        "index scores without relu",
        "kernels/indexer.py",
        'torch.einsum("qhn,gn->qhg", q.float(), keys).relu_()',
        'torch.einsum("qhn,gn->qhg", q.float(), keys)',
    ),
    Mutation(
        "the pad before the sequence is not compressed",
        _V41 + "ngram_hash.py",
        "int(token_map[config.pad_token_id])",
        "int(config.pad_token_id)",
    ),
    Mutation(
        "n-grams end at the step's first token",
        _V41 + "ngram_hash.py",
        "] = previous\n",
        "] = previous.clamp(max=-1)\n",
    ),
    Mutation("hash functions share their rows", _V41 + "ngram_hash.py", " + self._offsets[:, size].unsqueeze(1)", ""),
    Mutation(
        "the gate loses its sign",
        _V41 + "engram.py",
        "torch.copysign(dot.abs().clamp(min=_MIN_DOT).sqrt(), dot)",
        "dot.abs().clamp(min=_MIN_DOT).sqrt()",
    ),
]


def first_failure(mutation: Mutation | None, scratch: Path) -> str | None:
    """The name of the first test that fails with the mutation, or with none; None if none does."""
    copy = scratch / "headrace_engine"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    if mutation is not None:
        file = copy / mutation.file
        file.write_text(mutated(mutation, file.read_text(encoding="utf-8")), encoding="utf-8")
    context = multiprocessing.get_context("fork")  # the child has torch already, and no engine yet
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run_tests, args=(scratch, sender))
    child.start()
    try:
        if not receiver.poll(LIMIT_SECONDS):
            raise TimeoutError(f"the tests did not end within {LIMIT_SECONDS} s")
        failure: str | None = receiver.recv()
        return failure
    finally:
        child.kill()
        child.join()


def _run_tests(scratch: Path, sender: Connection) -> None:
    """In a child: the tests on the engine in `scratch`, silently; sends the first failure's name, or None."""
    sys.path.insert(0, str(scratch))
    sys.dont_write_bytecode = True
    os.environ["HEADRACE_KERNELS"] = "reference"
    torch.set_num_threads(1)
    seen = _FirstFailure()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", str(ROOT / TESTS)], plugins=[seen])
    sender.send(seen.name if seen.name or code == pytest.ExitCode.OK else f"pytest ended with {code!r}")


class _FirstFailure:
    """A pytest plugin."""

    name: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.name is None:
            self.name = report.nodeid.rpartition("::")[2]


def mutated(mutation: Mutation, text: str) -> str:
    """Raises ValueError unless there is exactly one such place."""
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation.what}: {mutation.file} has {text.count(mutation.old)} places {mutation.old!r}")
    return text.replace(mutation.old, mutation.new)


def main(words: list[str]) -> int:
    chosen = [m for m in MUTATIONS if not words or any(word in m.what for word in words)]
    num_unseen = 0
    with tempfile.TemporaryDirectory() as scratch:
        failure = first_failure(None, Path(scratch))
        print(f"{'nothing is changed':58} {failure or 'all pass'}", flush=True)
        if failure:
            return 1
        for mutation in chosen:
            failure = first_failure(mutation, Path(scratch))
            num_unseen += failure is None and mutation.can_be_seen
            note = "NOT SEEN" if mutation.can_be_seen else "not seen, as expected"
            print(f"{mutation.what:58} {failure or note}", flush=True)
    return 1 if num_unseen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
