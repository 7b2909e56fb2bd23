"""The benchmark model is the same everywhere, so that figures from two machines are about the same work."""

from __future__ import annotations

from pathlib import Path

from tests.bench import checkpoint
from tokenizers import Tokenizer


def test_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert checkpoint.write_checkpoint(tmp_path / name) == 50_788_217
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert "model.safetensors" in files
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_token_is_a_byte(tmp_path: Path) -> None:
    checkpoint.make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "Mühle, 水"
    token_ids = tokenizer.encode(text).ids
    assert len(token_ids) == len(text.encode())
    assert all(4 <= token <= 259 for token in token_ids)
    assert tokenizer.decode(token_ids) == text
    assert tokenizer.get_vocab_size() == checkpoint.VOCAB_SIZE
