"""Attention, indexer and compressor over scattered blocks and slots, against their references."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.engine.kernels.compare import assert_close

from headrace_engine import kernels as ops
from headrace_engine.kernels import compressor, indexer, shared_kv_attention
from headrace_engine.kernels.cases import Random, angles, frequencies, make_batch, num_blocks
from headrace_engine.models.protocol import ForwardBatch

pytestmark = pytest.mark.usefixtures("kernels")

STEPS = {
    "nothing": [],
    "one decode row at the start": [(0, 1)],
    "decode rows of many lengths": [(3, 1), (40, 1), (0, 1), (77, 1)],
    "a whole prompt": [(0, 50)],
    "a later chunk": [(45, 37)],
    "chunks, decode rows and an idle sequence": [(30, 1), (16, 24), (9, 0), (64, 1), (0, 5)],
}
steps = pytest.mark.parametrize("parts", STEPS.values(), ids=STEPS.keys())


def _attention_case(random: Random, batch: ForwardBatch, heads: int, dim: int, window: int, ratio: int) -> list:
    tokens, half = batch.num_tokens, dim // 4
    return [
        random.normal(tokens, heads, dim, scale=2.0),
        random.normal(tokens, dim),
        batch,
        random.normal(len(batch.query_lens) + 1, 3, window + 2, dim),
        1,
        window,
        random.wide(heads),
        dim**-0.5,
        *angles(batch.positions, half),
        ops.Entries(random.normal(num_blocks(batch) + 1, 2, 16 // ratio, dim), 1, ratio),
    ]


@steps
@pytest.mark.parametrize(("heads", "dim"), [(8, 64), (3, 20), (13, 96), (1, 32)])
def test_attention(parts: list, heads: int, dim: int, dtype: torch.dtype) -> None:
    random = Random(dtype)
    batch = make_batch(random, parts, block_size=16)
    case = _attention_case(random, batch, heads, dim, window=12, ratio=4)
    assert_close(ops.attention(*case), shared_kv_attention.attention_reference(*case), dtype, factor=2)


@steps
def test_attention_over_the_window_alone(parts: list, dtype: torch.dtype) -> None:
    random = Random(dtype)
    batch = make_batch(random, parts, block_size=16)
    case = [*_attention_case(random, batch, 8, 64, window=12, ratio=4)[:-1], None]
    assert_close(ops.attention(*case), shared_kv_attention.attention_reference(*case), dtype, factor=2)


def test_a_sink_that_takes_everything_leaves_nothing(dtype: torch.dtype) -> None:
    random = Random(dtype)
    case = _attention_case(random, make_batch(random, [(40, 3)], block_size=16), 8, 64, window=12, ratio=4)
    case[6].fill_(1e30)
    assert bool((ops.attention(*case) == 0).all())


@steps
def test_attention_over_selected_entries(parts: list, dtype: torch.dtype) -> None:
    random = Random(dtype)
    batch = make_batch(random, parts, block_size=16)
    *case, entries = _attention_case(random, batch, 8, 64, window=12, ratio=4)
    selected = torch.full((batch.num_tokens, 5), -1, dtype=torch.int32)
    for row, position in enumerate(batch.positions.tolist()):
        chosen = random.permutation((position + 1) // 4)[:5].sort().values
        selected[row, : len(chosen)] = chosen
    case.append(ops.Entries(entries.cache, entries.layer, entries.ratio, selected))
    assert_close(ops.attention(*case), shared_kv_attention.attention_reference(*case), dtype, factor=2)


def test_attention_of_a_chunk_at_the_real_head_size(dtype: torch.dtype) -> None:
    """Many queries share rows whose lengths and numbers differ widely."""
    random = Random(dtype)
    batch = make_batch(random, [(150, 20)], block_size=16)
    case = _attention_case(random, batch, 8, 512, window=128, ratio=4)
    for rows in (case[1], case[3], case[-1].cache):
        rows *= torch.exp(random.wide(*rows.shape[:-1], 1)).clamp(max=4)
        rows[..., 7] *= 10
    assert_close(ops.attention(*case), shared_kv_attention.attention_reference(*case), dtype, factor=2)


def test_attention_reads_nothing_but_the_sequence_own_rows(dtype: torch.dtype) -> None:
    """Poison in every other row must not reach the output."""
    random = Random(dtype)
    batch = make_batch(random, [(40, 3)], block_size=16)
    *case, entries = _attention_case(random, batch, 8, 64, window=12, ratio=4)
    expected = shared_kv_attention.attention_reference(*case, entries)
    ring, slot = case[3], batch.state_slots[0]
    kept_ring = ring[slot, 1].clone()
    ring.fill_(torch.nan)
    ring[slot, 1] = kept_ring
    old = torch.arange(40 - 11, 40) % ring.shape[2]
    unused = torch.ones(ring.shape[2], dtype=torch.bool)
    unused[old] = False
    ring[slot, 1, unused] = torch.nan
    closed = shared_kv_attention.paged_rows(entries.cache, 1, batch, 0, 4)
    entries.cache.fill_(torch.nan)
    numbers = torch.arange(43 // 4)
    entries.cache[batch.block_tables[0, numbers // 4].long(), 1, numbers % 4] = closed
    assert_close(ops.attention(*case, entries), expected, dtype, factor=2)


def test_large_logits_do_not_overflow(dtype: torch.dtype) -> None:
    random = Random(dtype)
    batch = make_batch(random, [(20, 2)], block_size=16)
    case = _attention_case(random, batch, 8, 64, window=12, ratio=4)
    case[0] = case[0] * 100
    assert torch.isfinite(ops.attention(*case)).all()


@steps
def test_write_ring(parts: list, dtype: torch.dtype) -> None:
    random = Random(dtype)
    batch = make_batch(random, parts, block_size=16)
    rows, ring = random.normal(batch.num_tokens, 24), random.normal(len(parts) + 1, 2, 12, 24)
    expected = ring.clone()
    shared_kv_attention.write_ring_reference(rows, expected, 1, batch)
    ops.write_ring(rows, ring, 1, batch)
    assert torch.equal(ring, expected)


@steps
@pytest.mark.parametrize(("heads", "dim", "topk"), [(8, 32, 7), (5, 18, 3), (64, 128, 16), (2, 8, 100)])
def test_select_entries(parts: list, heads: int, dim: int, topk: int, dtype: torch.dtype) -> None:
    """Equal choices in fp32; in bf16 every chosen entry's score is at least, and every other's at most, the reference's
    threshold within the rounding of sums in another order."""
    random = Random(dtype)
    batch = make_batch(random, parts, block_size=16)
    q, weights = random.normal(batch.num_tokens, heads, dim), random.wide(batch.num_tokens, heads)
    keys = random.normal(num_blocks(batch) + 1, 2, 8, dim)
    selected = ops.select_entries(q, weights, batch, keys, 1, 2, topk)
    expected = indexer.select_entries_reference(q, weights, batch, keys, 1, 2, topk)
    assert selected.shape == expected.shape
    for s, (start, first, length) in enumerate(shared_kv_attention.sequences(batch)):
        own_keys = shared_kv_attention.paged_rows(keys, 1, batch, s, 2).float()
        for row in range(start, start + length):
            chosen, num_visible = selected[row][selected[row] >= 0].long(), (first + row - start + 1) // 2
            assert chosen.tolist() == sorted(set(chosen.tolist()))
            assert len(chosen) == min(topk, num_visible)
            assert (selected[row, len(chosen) :] == -1).all()
            scores = indexer.entry_scores(q[row : row + 1], weights[row : row + 1], own_keys)[0, :num_visible]
            reference = expected[row][expected[row] >= 0].long()
            assert torch.allclose(
                scores[chosen].sort().values, scores[reference].sort().values, rtol=1e-4, atol=1e-4 * heads
            )


def test_scores_of_rows_of_any_length(dtype: torch.dtype) -> None:
    """Parallel rows have the largest dot product that their lengths allow, rows of zeros have none."""
    random, dim = Random(dtype), 96
    batch = make_batch(random, [(63, 1)], block_size=16)
    q, keys = random.normal(1, 8, dim), random.normal(num_blocks(batch), 1, 16, dim)
    q[0, 0], q[0, 1], q[0, 2, 1:] = 0, 5, 0
    for number, row in [(3, 0), (20, 100 * q[0, 3]), (21, -q[0, 3]), (40, 7), (41, 1e-4), (50, 1e4 * q[0, 2])]:
        keys[batch.block_tables[0, number // 16], 0, number % 16] = row
    case = (q, torch.linspace(0.5, 2, 8).view(1, -1), batch, keys, 0, 1)
    for topk in (1, 2, 3):
        assert torch.equal(ops.select_entries(*case, topk), indexer.select_entries_reference(*case, topk))


@pytest.mark.parametrize("parts", [[(4000, 1)], [(4000, 3)], [(2500, 1), (4000, 1)]], ids=str)
def test_choices_do_not_depend_on_the_number_of_threads(parts: list, dtype: torch.dtype) -> None:
    """Where sequences are fewer than threads, these share a sequence's entries."""
    random, heads, dim = Random(dtype), 3, 8
    batch = make_batch(random, parts, block_size=96)
    q, weights = random.normal(batch.num_tokens, heads, dim), random.wide(batch.num_tokens, heads)
    keys = random.normal(num_blocks(batch), 1, 96, dim)
    asked, found = (q, weights, batch, keys, 0, 1, 20), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        selected, runs = ops.select_entries_and_runs(*asked, 8, 300)
        found.append([ops.select_entries(*asked), selected, runs, ops.select_within_runs(*asked, runs, 8)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert len({tuple(row) for row in found[0][3].tolist()}) == batch.num_tokens


@pytest.mark.parametrize("num_entries", [9, 700])
def test_equal_scores_keep_the_earlier_entries(num_entries: int, dtype: torch.dtype) -> None:
    random = Random(dtype)
    batch = make_batch(random, [(num_entries - 1, 1)], block_size=16)
    q, keys = torch.ones(1, 2, 8, dtype=dtype), torch.ones(num_blocks(batch), 1, 16, 8, dtype=dtype)
    best = batch.block_tables[0, (num_entries - 1) // 16]
    keys[best, 0, (num_entries - 1) % 16] = 2
    selected = ops.select_entries(q, torch.ones(1, 2), batch, keys, 0, 1, 4)
    assert selected.tolist() == [[0, 1, 2, num_entries - 1]]


@steps
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("series", "ratio"), [(1, 4), (2, 4), (1, 16), (2, 2)])
def test_compress(parts: list, series: int, ratio: int, cache_dtype: torch.dtype, dtype: torch.dtype) -> None:
    random, dim = Random(dtype), 24
    batch = make_batch(random, parts, block_size=16)
    width = series * dim
    rows = random.normal(batch.num_tokens, 2 * width + 3)[:, 3:]
    carry = random.wide(len(parts) + 1, 2, series * ratio, 2 * width)
    entries = random.wide(num_blocks(batch) + 1, 2, 16 // ratio, dim).to(cache_dtype)
    weights = [random.wide(ratio, width), batch, carry, 1, random.wide(dim), frequencies(6), 1e-6, entries, 0]
    expected_carry, expected_entries = carry.clone(), entries.clone()
    expected = [*weights[:2], expected_carry, *weights[3:7], expected_entries, 0]
    compressor.compress_reference(rows, *expected)
    ops.compress(rows, *weights)
    assert_close(carry, expected_carry, torch.float32)
    assert_close(entries, expected_entries, cache_dtype)
    untouched = torch.ones(len(entries), dtype=torch.bool)
    untouched[batch.block_tables.flatten().long()] = False
    assert torch.equal(entries[untouched], expected_entries[untouched])


def test_compressing_in_steps_gives_the_entries_of_one_chunk(dtype: torch.dtype) -> None:
    random, dim, ratio, total = Random(dtype), 16, 4, 23
    rows, bias, norm = random.normal(total, 4 * dim), random.wide(ratio, 2 * dim), random.wide(dim)
    whole = make_batch(random, [(0, total)], block_size=8)
    results = []
    for cuts in ([0, total], [0, 1, 6, 7, 8, 20, total]):
        carry, entries = torch.zeros(1, 1, 2 * ratio, 4 * dim), torch.zeros(num_blocks(whole), 1, 2, dim, dtype=dtype)
        for low, high in itertools.pairwise(cuts):
            step = make_batch(Random(dtype), [(low, high - low)], block_size=8)
            step.block_tables, step.state_slots = whole.block_tables, torch.zeros(1, dtype=torch.int64)
            ops.compress(rows[low:high], bias, step, carry, 0, norm, frequencies(4), 1e-6, entries, 0)
        results.append(entries)
    assert torch.equal(results[0], results[1])


def _best(scores: list[float], topk: int) -> list[int]:
    """Places of the topk best, lower places first among equals; ascending."""
    return sorted(sorted(range(len(scores)), key=lambda place: -scores[place])[:topk])


@steps
@pytest.mark.parametrize(("ratio", "run_size", "num_runs", "topk"), [(1, 4, 3, 5), (2, 8, 2, 4), (1, 3, 100, 7)])
def test_two_level_selection(parts: list, ratio: int, run_size: int, num_runs: int, topk: int) -> None:
    """Against lists of scores in plain Python: runs by their best entry, the newest always, then entries in them."""
    random, heads, dim = Random(torch.float32), 8, 16
    batch = make_batch(random, parts, block_size=16)
    q, weights = random.normal(batch.num_tokens, heads, dim), random.wide(batch.num_tokens, heads)
    keys = random.normal(num_blocks(batch) + 1, 2, 16 // ratio, dim)
    asked = (q, weights, batch, keys, 1, ratio)
    first, runs = ops.select_entries_and_runs(*asked, topk, run_size, num_runs)
    assert torch.equal(first, ops.select_entries(*asked, topk))
    selected = ops.select_within_runs(*asked, topk, runs, run_size)
    if num_runs * run_size * ratio >= batch.max_context_len:
        assert torch.equal(selected, first), "while every run is a candidate one level is enough"
    assert runs.shape == (batch.num_tokens, num_runs)
    assert selected.shape == (batch.num_tokens, topk)
    for s, (start, first, length) in enumerate(shared_kv_attention.sequences(batch)):
        own_keys = shared_kv_attention.paged_rows(keys, 1, batch, s, ratio)
        for row in range(start, start + length):
            num_visible = (first + row - start + 1) // ratio
            rows = slice(row, row + 1)
            scores = indexer.entry_scores(q[rows], weights[rows], own_keys)[0, :num_visible].tolist()
            best_of_run = [max(scores[i : i + run_size]) for i in range(0, num_visible, run_size)]
            if best_of_run:
                best_of_run[-1] = float("inf")
            expected_runs = _best(best_of_run, num_runs)
            assert runs[row].tolist() == expected_runs + [-1] * (num_runs - len(expected_runs))
            inside = [g for g in range(num_visible) if g // run_size in expected_runs]
            expected = [inside[place] for place in _best([scores[g] for g in inside], topk)]
            assert selected[row].tolist() == expected + [-1] * (topk - len(expected))
