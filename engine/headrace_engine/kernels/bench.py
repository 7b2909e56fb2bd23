"""Microseconds of every kernel beside its torch reference: `python -m headrace_engine.kernels.bench [--rows 1 8 32]`.

Shapes are those of a small DeepSeek-V4 (hidden 256, 8 heads of 512, 64 experts of 128). GB/s counts each weight and
cached row that the operation must read once, GFLOP/s its multiplications and additions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from headrace_engine import kernels
from headrace_engine.kernels import (
    compressor,
    experts,
    hyper_connection,
    indexer,
    linears,
    native,
    norm_rope,
    routing,
    shared_kv_attention,
)
from headrace_engine.kernels.cases import Random, angles, frequencies, make_batch, num_blocks
from headrace_engine.models.quantize import FP4_ROW

_HIDDEN, _STREAMS, _HEADS, _DIM, _WINDOW, _HALF = 256, 4, 8, 512, 128, 32
_EXPERTS, _TOPK, _WIDTH = 64, 6, 128
_INDEX_HEADS, _INDEX_DIM, _INDEX_TOPK, _RATIO, _BLOCK, _RUN = 64, 128, 512, 4, 256, 8
_SECONDS_PER_CASE = 0.2


@dataclass
class Case:
    name: str
    run: Callable[[], Any]
    reference: Callable[[], Any]
    num_bytes: float  # that must be read at least once
    operations: float


def best_seconds(run: Callable[[], Any]) -> float:
    """The fastest of the runs that fit into a fixed time; at least two, of which the first warms up."""
    run()
    best, end = float("inf"), time.perf_counter() + _SECONDS_PER_CASE
    while True:
        start = time.perf_counter()
        run()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return best


def token_cases(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    """Operations on each token alone."""
    random, size = Random(dtype), dtype.itemsize
    streams, x = random.normal(rows, _STREAMS, _HIDDEN), random.normal(rows, _HIDDEN)
    outputs = (2 + _STREAMS) * _STREAMS
    fn = random.wide(outputs, _STREAMS * _HIDDEN, scale=0.03)
    mix = (fn, random.wide(outputs), random.wide(3), torch.ones(_HIDDEN))
    keys: dict[str, Any] = {"rms_eps": 1e-6, "hc_eps": 1e-6, "iterations": 20}
    yield Case(
        "hyper_connection_mix",
        lambda: kernels.hyper_connection_mix(streams, *mix, **keys),
        lambda: hyper_connection.hyper_connection_mix_reference(streams, *mix, **keys),
        fn.numel() * 4,
        2 * rows * fn.numel(),
    )
    cos, sin = angles(torch.arange(rows), _HALF)
    q = random.normal(rows, _HEADS, _DIM)
    yield Case(
        "head_norm_rope",
        lambda: kernels.head_norm_rope(q, cos, sin, 1e-6),
        lambda: norm_rope.head_norm_rope_reference(q, cos, sin, 1e-6),
        q.numel() * size,
        6 * q.numel(),
    )
    for name, columns, depth in (("linear 256 -> 3264", 3264, _HIDDEN), ("linear 128 -> 4096", 4096, 128)):
        inputs, weight = random.normal(rows, depth), random.normal(columns, depth)
        yield _linear_case(name, inputs, weight)
    gate, bias = random.wide(_EXPERTS, _HIDDEN), random.wide(_EXPERTS)
    yield Case(
        "route",
        lambda: kernels.route(x, gate, bias, None, _TOPK, 1.5),
        lambda: routing.route_reference(x, gate, bias, None, _TOPK, 1.5),
        gate.numel() * 4,
        2 * rows * gate.numel(),
    )
    yield _expert_case(random, rows)
    if kernels.Fp4Stack.fits("cpu", dtype, [2 * _WIDTH, _HIDDEN], _WIDTH):
        yield _fp4_expert_case(random, rows)


def _linear_case(name: str, x: torch.Tensor, weight: torch.Tensor) -> Case:
    prepared = kernels.prepare(weight)
    return Case(
        name,
        lambda: kernels.linear(x, prepared),
        lambda: linears.linear_reference(x, weight),
        weight.numel() * weight.element_size(),
        2 * len(x) * weight.numel(),
    )


def _expert_case(random: Random, rows: int) -> Case:
    x, weights = random.normal(rows * _TOPK, _HIDDEN), random.wide(rows * _TOPK)
    ids = torch.cat([random.permutation(_EXPERTS)[:_TOPK] for _ in range(rows)])
    w13, w2 = random.normal(_EXPERTS, 2 * _WIDTH, _HIDDEN, scale=0.06), random.normal(_EXPERTS, _HIDDEN, _WIDTH)
    prepared = kernels.prepare(w13), kernels.prepare(w2)
    per_expert = 3 * _WIDTH * _HIDDEN
    return Case(
        "expert_mlp",
        lambda: kernels.expert_mlp(x, ids, weights, *prepared, 10.0),
        lambda: experts.expert_mlp_reference(x, ids, weights, w13, w2, 10.0),
        len(set(ids.tolist())) * per_expert * random.dtype.itemsize,
        2 * len(x) * per_expert,
    )


def _fp4_expert_case(random: Random, rows: int) -> Case:
    """The same, with weights kept as checkpoints store them."""
    x, weights = random.normal(rows * _TOPK, _HIDDEN), random.wide(rows * _TOPK)
    ids = torch.cat([random.permutation(_EXPERTS)[:_TOPK] for _ in range(rows)])
    stacks = [kernels.Fp4Stack(_EXPERTS, [n], k) for n, k in ((2 * _WIDTH, _HIDDEN), (_HIDDEN, _WIDTH))]
    for stack, n, k in zip(stacks, (2 * _WIDTH, _HIDDEN), (_HIDDEN, _WIDTH), strict=True):
        for expert in range(_EXPERTS):
            codes, scale = random.integers(0, 256, n, k // 2), random.integers(115, 122, n, k // FP4_ROW)
            stack.write(expert, 0, codes.to(torch.uint8), scale.to(torch.uint8))
    w13, w2 = (stack.weight() for stack in stacks)
    plain13, plain2 = w13.plain(), w2.plain()
    per_expert = 3 * _WIDTH * _HIDDEN
    return Case(
        "expert_mlp, FP4",
        lambda: kernels.expert_mlp(x, ids, weights, w13, w2, 10.0),
        lambda: experts.expert_mlp_reference(x, ids, weights, plain13, plain2, 10.0),
        len(set(ids.tolist())) * per_expert * (1 / 2 + 1 / FP4_ROW),
        2 * len(x) * per_expert,
    )


def cache_cases(rows: int, context: int, dtype: torch.dtype) -> Iterator[Case]:
    """Operations that read the cache: `rows` sequences of `context` tokens, one query each."""
    random, size = Random(dtype), dtype.itemsize
    batch = make_batch(random, [(context - 1, 1)] * rows, _BLOCK)
    num_entries, blocks = context // _RATIO, num_blocks(batch)
    q, kv, ring = random.normal(rows, _HEADS, _DIM), random.normal(rows, _DIM), random.normal(rows, 1, _WINDOW, _DIM)
    cos, sin = angles(batch.positions, _HALF)
    index_q, weights = random.normal(rows, _INDEX_HEADS, _INDEX_DIM), random.wide(rows, _INDEX_HEADS)
    keys = random.normal(blocks, 1, _BLOCK // _RATIO, _INDEX_DIM)
    select = (index_q, weights, batch, keys, 0, _RATIO, _INDEX_TOPK)
    selected = kernels.select_entries(*select) if num_entries > _INDEX_TOPK else None
    entries = kernels.Entries(random.normal(blocks, 1, _BLOCK // _RATIO, _DIM), 0, _RATIO, selected)
    attend = (q, kv, batch, ring, 0, _WINDOW, random.wide(_HEADS), _DIM**-0.5, cos, sin, entries)
    num_keys = rows * (min(context, _WINDOW) + min(num_entries, _INDEX_TOPK))
    yield Case(
        f"attention, context {context}",
        lambda: kernels.attention(*attend),
        lambda: shared_kv_attention.attention_reference(*attend),
        num_keys * _DIM * size,
        4 * num_keys * _HEADS * _DIM,
    )
    if num_entries > _INDEX_TOPK:
        yield Case(
            f"select_entries, context {context}",
            lambda: kernels.select_entries(*select),
            lambda: indexer.select_entries_reference(*select),
            rows * num_entries * _INDEX_DIM * size,
            2 * rows * num_entries * _INDEX_HEADS * _INDEX_DIM,
        )
    yield from _two_level_cases(random, select, num_entries)
    carry = random.wide(rows, 1, 2 * _RATIO, 4 * _DIM)
    compress = (
        random.normal(rows, 4 * _DIM), random.wide(_RATIO, 2 * _DIM), batch, carry, 0, torch.ones(_DIM),
        frequencies(_HALF), 1e-6, entries.cache, 0,
    )  # fmt: skip
    yield Case(
        "compress, every row closes a group",
        lambda: kernels.compress(*compress),
        lambda: compressor.compress_reference(*compress),
        rows * 2 * _RATIO * 2 * _DIM * 4,
        rows * 2 * _RATIO * _DIM * 4,
    )


def _two_level_cases(random: Random, select: tuple[Any, ...], num_entries: int) -> Iterator[Case]:
    """Both levels of DeepSeek-V4.1's selection, where a quarter of the entries are candidates."""
    rows, num_runs = len(select[0]), num_entries // _RUN // 4
    if num_runs * _RUN <= _INDEX_TOPK:
        return
    size, products = random.dtype.itemsize, _INDEX_HEADS * _INDEX_DIM
    runs = torch.stack([random.permutation(num_entries // _RUN)[:num_runs].sort().values for _ in range(rows)]).int()
    both, within = (*select, _RUN, num_runs), (*select, runs, _RUN)
    yield Case(
        f"select_entries_and_runs of {num_entries}",
        lambda: kernels.select_entries_and_runs(*both),
        lambda: indexer.select_entries_and_runs_reference(*both),
        rows * num_entries * _INDEX_DIM * size,
        2 * rows * num_entries * products,
    )
    yield Case(
        f"select_within_runs, {num_runs * _RUN} of {num_entries}",
        lambda: kernels.select_within_runs(*within),
        lambda: indexer.select_within_runs_reference(*within),
        rows * num_runs * _RUN * _INDEX_DIM * size,
        2 * rows * num_runs * _RUN * products,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[160, 8192], help="multiples of 4")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if native.library() is None:
        parser.exit(1, "there are no compiled kernels to measure\n")
    dtype = getattr(torch, arguments.dtype)
    print(f"{'rows':>5} {'operation':36} {'kernel us':>10} {'torch us':>10} {'GB/s':>7} {'GFLOP/s':>8}")
    with torch.inference_mode():
        for rows in arguments.rows:
            cases = list(token_cases(rows, dtype))
            for context in arguments.contexts:
                cases += cache_cases(rows, context, dtype)
            for case in cases:
                seconds, reference = best_seconds(case.run), best_seconds(case.reference)
                print(
                    f"{rows:>5} {case.name:36} {seconds * 1e6:>10.1f} {reference * 1e6:>10.1f} "
                    f"{case.num_bytes / seconds / 1e9:>7.1f} {case.operations / seconds / 1e9:>8.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
