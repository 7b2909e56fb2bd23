"""Bounded replay against the plain reference: which rows are left out, and what must stay exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.engine.model.harness import PagedRun, Sequence, assert_close, random_tokens
from tests.engine.model_v41.conftest import Expected
from tests.reference.deepseek_v41 import Reference, token_map
from tests.reference.deepseek_v41_replay import ReplayReference
from tokenizers import Tokenizer

from headrace_engine import models
from headrace_engine.models import ModelError
from headrace_engine.models.deepseek_v41.model import DeepseekV41
from headrace_engine.models.deepseek_v41.tiny import TINY_TEXT_CONFIG
from headrace_engine.models.tiny import write_tiny

TEXT, OTHER = random_tokens(50, seed=1), random_tokens(50, seed=2)
WINDOW = TINY_TEXT_CONFIG["sliding_window"]
LAST_SOURCE = max(TINY_TEXT_CONFIG["kv_source_layer_ids"])


@pytest.fixture(scope="module")
def replaying(tiny_path: Path) -> DeepseekV41:
    loaded = models.load(tiny_path, bounded_replay=True)
    assert isinstance(loaded, DeepseekV41)
    return loaded


@pytest.fixture(scope="module")
def plain(tiny_path: Path) -> Reference:
    compressed = token_map(Tokenizer.from_file(str(tiny_path / "tokenizer.json")))
    return Reference(TINY_TEXT_CONFIG, load_file(tiny_path / "model.safetensors"), compressed, dtype=torch.float64)


def run_last(run: PagedRun, parts: list[tuple[Sequence, list[int]]], replay: list[int] | None = None) -> torch.Tensor:
    """One step that wants the logits of each sequence's last row: [S, vocab]."""
    batch = run.batch(parts)
    batch.logit_rows = batch.query_starts[1:] - 1
    batch.replay_lens = None if replay is None else tuple(replay)
    return run.model.forward(batch, run.cache, run.exchange)


def assert_row(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert_close(actual.unsqueeze(0), expected.float().unsqueeze(0))


@pytest.mark.parametrize("chunks", [[30], [8, 17], [9, 1, 1, 10]], ids=str)
def test_rows_left_out_of_long_chunks(replaying: DeepseekV41, plain: Reference, chunks: list[int]) -> None:
    run, reference = PagedRun(replaying), ReplayReference(plain)
    sequence = run.sequence(64)
    for size in chunks:
        first = sequence.length
        logits = run_last(run, [(sequence, TEXT[first : first + size])])
        assert_row(logits[0], reference.step(TEXT[: first + size], first)[first + size - 1])


def test_chunks_up_to_the_window_are_exact(replaying: DeepseekV41, expected: Expected) -> None:
    assert_close(PagedRun(replaying).prompt(TEXT, [WINDOW, 1, 5]), expected(TEXT))


def test_a_sequence_that_wants_logits_of_its_prompt_runs_whole(replaying: DeepseekV41, expected: Expected) -> None:
    run = PagedRun(replaying)
    scored, other = run.sequence(64), run.sequence(64)
    batch = run.batch([(other, OTHER[:30]), (scored, TEXT[:30])])
    batch.logit_rows = torch.tensor([29, 31, 59])
    logits = replaying.forward(batch, run.cache, run.exchange)
    assert_close(logits[1:], expected(TEXT)[[1, 29]])
    assert float((logits[0] - expected(OTHER)[29]).abs().max()) > 1e-2


def test_a_batch_leaves_out_the_same_rows_as_each_sequence_alone(replaying: DeepseekV41) -> None:
    run = PagedRun(replaying, seed=3)
    texts = [TEXT[:30], OTHER[:1], OTHER[:9], TEXT[:8], OTHER[:47]]
    sequences = [run.sequence(64) for _ in texts]
    together = run_last(run, list(zip(sequences, texts, strict=True)))
    following = run_last(run, [(sequence, [9]) for sequence in sequences])
    for text, first, second in zip(texts, together, following, strict=True):
        alone = PagedRun(replaying)
        sequence = alone.sequence(64)
        assert_row(first, run_last(alone, [(sequence, text)])[0])
        assert_row(second, run_last(alone, [(sequence, [9])])[0])


def test_entries_and_lower_windows_stay_exact(replaying: DeepseekV41, model: DeepseekV41) -> None:
    caches = []
    for each in (model, replaying):
        run = PagedRun(each)
        run_last(run, [(run.sequence(64), TEXT)])
        caches.append(run.cache)
    for name, exact in caches[0].items():
        found = caches[1][name]
        if name == "window":
            assert not torch.equal(found[:, LAST_SOURCE + 1 :].nan_to_num(), exact[:, LAST_SOURCE + 1 :].nan_to_num())
            found, exact = found[:, : LAST_SOURCE + 1], exact[:, : LAST_SOURCE + 1]
        assert torch.equal(found.nan_to_num(), exact.nan_to_num())


@pytest.mark.parametrize(("hit", "length"), [(16, 17), (16, 29), (24, 28)])
def test_a_prefix_hit_without_its_windows(replaying: DeepseekV41, plain: Reference, hit: int, length: int) -> None:
    """The heir has the donor's blocks and a slot that holds nothing of it."""
    text = TEXT[:hit] + OTHER[hit:length]
    run, reference = PagedRun(replaying), ReplayReference(plain)
    donor, heir = run.sequence(64), run.sequence(64)
    run_last(run, [(donor, TEXT[:hit])])
    reference.step(TEXT[:hit], 0)
    heir.blocks[: hit // 8] = donor.blocks[: hit // 8]
    kept = {name: run.cache[name][donor.blocks[: hit // 8]].clone() for name in ("kv_1", "kv_2", "index_1", "index_2")}
    reference.forget_windows()
    heir.length, heir.token_ids = hit - WINDOW, text[: hit - WINDOW]
    logits = run_last(run, [(heir, text[hit - WINDOW :])], [WINDOW])
    assert_row(logits[0], reference.step(text, hit - WINDOW, num_replayed=WINDOW)[length - 1])
    logits = run_last(run, [(heir, [9])])
    assert_row(logits[0], reference.step([*text, 9], length)[length])
    for name, blocks in kept.items():
        assert torch.equal(run.cache[name][donor.blocks[: hit // 8]], blocks), name


def test_a_cache_of_packed_records_replays_as_one_of_rounded_entries(tiny_path: Path) -> None:
    outputs = []
    for cache_dtype in ("float32", "fp4"):
        run = PagedRun(
            models.load(
                tiny_path,
                dtype="float32",
                cache_dtype=cache_dtype,
                fake_quantization="cache",
                bounded_replay=True,
            )
        )
        donor, heir = run.sequence(64), run.sequence(64)
        made = [run_last(run, [(donor, TEXT[:16])]), run_last(run, [(donor, TEXT[16:33])])]
        heir.blocks[:2] = donor.blocks[:2]
        heir.length, heir.token_ids = 16 - WINDOW, TEXT[: 16 - WINDOW]
        made.append(run_last(run, [(heir, TEXT[16 - WINDOW : 16] + OTHER[:13])], [WINDOW]))
        outputs.append(torch.cat([*made, run_last(run, [(heir, [9])])]))
    assert torch.equal(*outputs)


def test_what_is_refused(model: DeepseekV41, replaying: DeepseekV41, tmp_path: Path) -> None:
    run = PagedRun(model)
    with pytest.raises(ValueError, match="loaded with bounded_replay"):
        run_last(run, [(run.sequence(64), TEXT[:9])], [8])
    run = PagedRun(replaying)
    for replay in ([9], [7], [1, 1]):
        with pytest.raises(ValueError, match="replay"):
            run_last(run, [(run.sequence(64), TEXT[:9])], replay)
    write_tiny(tmp_path, "v4", 0)
    with pytest.raises(ModelError, match=r"only V4\.1"):
        models.load(tmp_path, bounded_replay=True)


def test_the_digest_says_that_rows_are_left_out(model: DeepseekV41, replaying: DeepseekV41) -> None:
    assert model.digest != replaying.digest
