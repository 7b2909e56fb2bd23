"""A cache in packed records, of both families: the very numbers that rounding plain entries gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.engine.model.harness import PagedRun, random_tokens

from headrace_engine import models
from headrace_engine.kv.layout import fingerprint
from headrace_engine.models import ModelError
from headrace_engine.models.tiny import write_tiny

TOKENS = random_tokens(50, seed=1)


@pytest.fixture(scope="module", params=["v4", "v41"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    write_tiny(folder, request.param, 0)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_records_equal_rounded_entries(path: Path, dtype: str) -> None:
    """Nothing but the entries is read: pages are full of NaN before anything is written."""
    plain = PagedRun(models.load(path, dtype=dtype, cache_dtype=dtype, fake_quantization="cache"))
    packed = PagedRun(models.load(path, dtype=dtype, cache_dtype="fp4", fake_quantization="cache"))
    for chunks in ([50], [5, 1, 1, 8]):
        assert torch.equal(packed.prompt(TOKENS, chunks), plain.prompt(TOKENS, chunks))


def test_sequences_of_one_batch_read_their_own_records(path: Path) -> None:
    model = models.load(path, cache_dtype="fp8")
    run = PagedRun(model)
    texts = [random_tokens(length, seed=length) for length in (9, 23, 40)]
    sequences = [run.sequence(64) for _ in texts]
    together = run.step([(s, text[:-2]) for s, text in zip(sequences, texts, strict=True)])
    for step in (-2, -1):
        rows = run.step([(s, [text[step]]) for s, text in zip(sequences, texts, strict=True)])
        together = [torch.cat(pair) for pair in zip(together, rows, strict=True)]
    for text, logits in zip(texts, together, strict=True):
        alone = PagedRun(model, seed=1).prompt(text, [len(text) - 2, 1])
        assert float(((logits - alone).abs().amax(-1) < 1e-4).float().mean()) > 0.5


def test_a_step_without_tokens_touches_nothing(path: Path) -> None:
    run = PagedRun(models.load(path, cache_dtype="fp4"))
    before = {name: tensor.clone() for name, tensor in run.cache.items()}
    assert run.step([]) == []
    assert all(torch.equal(before[name].view(torch.uint8), run.cache[name].view(torch.uint8)) for name in before)


def test_the_kind_of_cache_is_part_of_the_fingerprint(path: Path) -> None:
    prints = set()
    for cache_dtype in ("float32", "bfloat16", "fp8", "fp4"):
        model = models.load(path, cache_dtype=cache_dtype)
        prints.add(fingerprint(model.cache_groups, 8, model.digest))
    assert len(prints) == 4


def test_another_cache_dtype_is_refused(path: Path) -> None:
    with pytest.raises(ModelError, match="supported: auto, float32, bfloat16, fp8, fp4"):
        models.load(path, cache_dtype="fp6")
