"""Engram's token map, hash functions and tables."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.engine.model.harness import PagedRun, assert_close, random_tokens
from tests.engine.model_v41.conftest import Expected
from tests.reference import deepseek_v41 as reference
from tests.reference.v41_cases import make_tokenizer
from tokenizers import Tokenizer

from headrace_engine import models
from headrace_engine.models import ModelError
from headrace_engine.models.deepseek_v41.config import EngramConfig
from headrace_engine.models.deepseek_v41.model import DeepseekV41
from headrace_engine.models.deepseek_v41.ngram_hash import bucket_counts, multipliers, ngrams_of_step
from headrace_engine.models.deepseek_v41.tiny import TINY_TEXT_CONFIG
from headrace_engine.models.deepseek_v41.token_map import token_map

PUBLISHED = EngramConfig(
    layers=(1, 14),
    num_rows=(384006168, 384016682),
    max_ngram=4,
    num_heads=8,
    row_dim=256,
    bucket_base=16_000_000,
    pad_token_id=2,
    compressed_vocab_size=99092,
)


def test_the_published_tables_have_exactly_the_rows_that_their_buckets_need() -> None:
    assert tuple(bucket_counts(PUBLISHED).sum(axis=(1, 2)).tolist()) == PUBLISHED.num_rows


def test_the_published_factors() -> None:
    assert multipliers(1, 4, 99092).tolist() == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert multipliers(14, 4, 99092).tolist() == [67716810739261, 51510806800915, 30921347202721, 82619226485591]


def test_no_product_with_a_compressed_id_overflows() -> None:
    for layer in range(40):
        assert max(multipliers(layer, 4, 99092).tolist()) * 99091 < 2**63


def test_tokens_fold_together_as_in_the_reference() -> None:
    tokenizer = make_tokenizer()
    compressed, num_compressed = token_map(tokenizer)
    assert compressed.tolist() == reference.token_map(tokenizer)
    assert num_compressed == len(set(compressed.tolist())) < len(compressed)


@pytest.mark.parametrize(
    ("tokens", "lengths", "previous", "expected"),
    [
        ([7], (1,), [[-1, -1]], [[7, -1, -1]]),
        ([7, 8, 9], (3,), [[-1, -1]], [[7, -1, -1], [8, 7, -1], [9, 8, 7]]),
        ([9], (1,), [[7, 8]], [[9, 8, 7]]),
        ([9], (1,), [[-1, 8]], [[9, 8, -1]]),
        ([5, 6, 9], (2, 1), [[-1, 4], [7, 8]], [[5, 4, -1], [6, 5, 4], [9, 8, 7]]),
        ([], (), [], []),
    ],
    ids=["first token", "prompt", "decode", "second token", "chunk and decode", "idle"],
)
def test_ngrams_look_back_into_earlier_steps_and_never_into_another_sequence(
    tokens: list[int], lengths: tuple[int, ...], previous: list[list[int]], expected: list[list[int]]
) -> None:
    before = torch.tensor(previous, dtype=torch.int64).view(len(lengths), 2)
    ngrams = ngrams_of_step(torch.tensor(tokens, dtype=torch.int64), lengths, before)
    assert ngrams.tolist() == expected


def test_before_the_sequence_is_the_compressed_pad(model: DeepseekV41, tiny_path: Path, expected: Expected) -> None:
    """The tiny model's pad id is one that compression renumbers, so that taking the id itself would show."""
    pad = TINY_TEXT_CONFIG["engram_pad_token_id"]
    assert token_map(Tokenizer.from_file(str(tiny_path / "tokenizer.json")))[0][pad] != pad
    tokens = random_tokens(3, seed=77)
    assert_close(PagedRun(model).prompt(tokens), expected(tokens))


def test_tables_stay_in_the_mapped_file(model: DeepseekV41, tiny_path: Path) -> None:
    assert model.engrams is not None
    mappings = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    for table in model.engrams.tables:
        address = table.weight.data_ptr()
        files = [m[5] for m in mappings if len(m) > 5 and _contains(m[0], address)]
        assert files == [str(tiny_path / "model.safetensors")]


def _contains(addresses: str, address: int) -> bool:
    start, end = (int(part, 16) for part in addresses.split("-"))
    return start <= address < end


@pytest.fixture
def copy(tiny_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_path, tmp_path / "copy"))


def change_config(path: Path, **values: object) -> None:
    config = json.loads((path / "config.json").read_text())
    config["text_config"].update(values)
    (path / "config.json").write_text(json.dumps(config))


def test_a_tokenizer_of_another_model_is_refused(copy: Path) -> None:
    change_config(copy, engram_compressed_vocab_size=200)
    with pytest.raises(ModelError, match=r"243 different tokens .* engram_compressed_vocab_size = 200"):
        models.load(copy)


def test_a_checkpoint_without_a_tokenizer_is_refused(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        models.load(copy)


def test_more_buckets_than_rows_are_refused(copy: Path) -> None:
    change_config(copy, engram_vocab_size=151)
    with pytest.raises(ModelError, match=r"engram layer 1 hashes into \d+ rows, its table has 667"):
        models.load(copy)
