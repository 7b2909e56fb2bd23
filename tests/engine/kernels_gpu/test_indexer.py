"""Index scores and the best of each run at the published head size, against plain torch."""

from __future__ import annotations

import pytest
import torch
from tests.engine.kernels.compare import TOLERANCE

from headrace_engine.kernels.cases import Random, make_batch, num_blocks
from headrace_engine.kernels.gpu import indexer as gpu
from headrace_engine.kernels.gpu.pages import scatter_entries_reference
from headrace_engine.kernels.gpu.records import Pages
from headrace_engine.kv.records import INDEX_68, INDEX_132, RecordFormat
from headrace_engine.models.protocol import ForwardBatch

DIM, RUN = 128, 8


def _case(random: Random, batch: ForwardBatch, ratio: int, heads: int = 32) -> tuple:
    keys = random.normal(num_blocks(batch), 2, 16 // ratio, DIM)
    q, weights = random.normal(batch.num_tokens, heads, DIM), random.wide(batch.num_tokens, heads)
    return q, weights, batch, Pages(keys, 1), ratio, RUN


def _assert_same(case: tuple) -> None:
    """Equal where nothing is seen or forced, close elsewhere."""
    dtype = case[0].dtype
    for found, expected in zip(gpu.index_scores(*case), gpu.index_scores_reference(*case), strict=True):
        assert found.shape == expected.shape
        finite = expected.isfinite()
        assert torch.equal(found.isfinite(), finite)
        assert torch.equal(found[~finite], expected[~finite])
        size = expected[finite].square().mean().sqrt() if finite.any() else 1.0
        assert ((found - expected)[finite].abs() <= TOLERANCE[dtype] * (size + expected[finite].abs())).all()


@pytest.mark.parametrize("ratio", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_scores_of_what_each_query_sees(ratio: int) -> None:
    """A query that sees nothing, runs that end beyond what is seen, (ratio 1) more entries than a program scores."""
    random = Random(torch.float32)
    batch = make_batch(random, [(0, 1), (70, 2), (9, 0)], block_size=16)
    _assert_same(_case(random, batch, ratio))


def test_scores_within_given_runs() -> None:
    random = Random(torch.float32)
    batch = make_batch(random, [(70, 1), (30, 1)], block_size=16)
    runs = torch.tensor([[0, 3, 7, 8], [1, 3, -1, -1]], dtype=torch.int32)  # the last of each query's is cut short
    _assert_same((*_case(random, batch, 1), runs))


@pytest.mark.slow
@pytest.mark.parametrize("heads", [32, 64])
def test_published_numbers_of_heads(heads: int) -> None:
    random = Random(torch.bfloat16)
    batch = make_batch(random, [(150, 1)], block_size=16)
    _assert_same(_case(random, batch, 1, heads))


@pytest.mark.parametrize(
    "record", [INDEX_68, pytest.param(INDEX_132, marks=pytest.mark.slow)], ids=lambda record: record.name
)
def test_packed_keys_score_as_what_they_decode_to(record: RecordFormat) -> None:
    random = Random(torch.float32)
    batch = make_batch(random, [(40, 1)], block_size=16)
    q, weights, batch, _, ratio, run = _case(random, batch, 1)
    pages = Pages(torch.zeros(num_blocks(batch), 2, 16 * record.record_bytes, dtype=torch.uint8), 1, record)
    entries = torch.arange(41)
    scatter_entries_reference(
        random.normal(len(entries), DIM), pages, batch.block_tables, torch.zeros_like(entries), entries
    )
    _assert_same((q, weights, batch, pages, ratio, run))


def test_what_does_not_fit_is_refused() -> None:
    random = Random(torch.float32)
    batch = make_batch(random, [(40, 1)], block_size=16)
    q, weights, batch, pages, ratio, _ = _case(random, batch, 1)
    with pytest.raises(ValueError, match="runs of 6 entries"):
        gpu.index_scores(q, weights, batch, pages, ratio, 6)
    with pytest.raises(ValueError, match=r"weights \[1, 32\]"):
        gpu.index_scores(q, weights[:, :16], batch, pages, ratio, RUN)
    with pytest.raises(ValueError, match="int32"):
        gpu.index_scores(q, weights, batch, pages, ratio, RUN, torch.zeros(1, 2, dtype=torch.int64))
