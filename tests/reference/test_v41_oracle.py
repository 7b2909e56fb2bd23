"""The plain reference against an independent implementation, and against the numbers that DeepSeek has published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.reference.deepseek_v41 import Reference, engram_multipliers, engram_primes, token_map
from tests.reference.rounding import V41Rounding
from tests.reference.v41_cases import CASES, EXPECTED, make_tokenizer, write_case

TOLERANCE = 1e-4  # of fp32 logits of order 1


@pytest.fixture(scope="module")
def compressed_ids() -> list[int]:
    return token_map(make_tokenizer())


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_nemo_automodels(name: str, compressed_ids: list[int], tmp_path: Path) -> None:
    config = write_case(tmp_path, name, len(set(compressed_ids)))
    weights = load_file(tmp_path / "model.safetensors")
    expected = load_file(EXPECTED)
    reference = Reference(config["text_config"], weights, compressed_ids, dtype=torch.float64)
    logits = reference.logits(expected[f"{name}.tokens"].tolist())
    assert float((logits - expected[f"{name}.logits"]).abs().max()) < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_logits_with_a_rounded_cache_equal_nemo_automodels(
    name: str, compressed_ids: list[int], tmp_path: Path
) -> None:
    """Most of them: one number that lies between two and goes the other way changes all that follows."""
    config = write_case(tmp_path, name, len(set(compressed_ids)))
    expected, num_tokens = load_file(EXPECTED), 24
    weights, rounding = load_file(tmp_path / "model.safetensors"), V41Rounding(cache=True)
    reference = Reference(config["text_config"], weights, compressed_ids, torch.float64, rounding)
    logits = reference.logits(expected[f"{name}.tokens"].tolist()[:num_tokens])
    errors = (logits - expected[f"{name}.rounded_logits"][:num_tokens]).abs().amax(-1)
    assert float((errors < TOLERANCE).float().mean()) >= 0.8


PUBLISHED = {
    "engram_layer_ids": [1, 14],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_vocab_size": 16000000,
    "engram_compressed_vocab_size": 99092,
}


def test_engram_tables_have_the_published_numbers_of_rows() -> None:
    assert [sum(map(sum, of_layer)) for of_layer in engram_primes(PUBLISHED)] == [384006168, 384016682]


def test_engram_factors_of_the_published_layers() -> None:
    assert engram_multipliers(PUBLISHED, 1) == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert engram_multipliers(PUBLISHED, 14) == [67716810739261, 51510806800915, 30921347202721, 82619226485591]


@pytest.mark.parametrize(
    ("one", "other"),
    [("the", "THE"), (" the", "The"), ("été", "Ete"), ("ﬁn", "fin"), ("①", "1"), ("  ", "\n"), ("a\tb", "a \n b")],
)
def test_tokens_that_engram_takes_for_one(one: str, other: str, compressed_ids: list[int]) -> None:
    assert compressed_ids[_token(one)] == compressed_ids[_token(other)]


@pytest.mark.parametrize(("one", "other"), [("ß", "ss"), ("\v", " "), ("日本", "が"), ("<bos>", "<eos>")])
def test_tokens_that_engram_keeps_apart(one: str, other: str, compressed_ids: list[int]) -> None:
    assert compressed_ids[_token(one)] != compressed_ids[_token(other)]


def _token(text: str) -> int:
    tokenizer = make_tokenizer()
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return next(i for i in range(size) if tokenizer.decode([i], skip_special_tokens=False) == text)
