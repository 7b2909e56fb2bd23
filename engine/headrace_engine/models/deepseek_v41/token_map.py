"""Which tokens count as the same for engram: case, accents, compatibility forms and kinds of white space fold together.

From the tokenizer alone, without weights (DeepSeek-V4.1 report, section on engram). No torch here.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, normalizers

from headrace_engine.models.errors import ModelError

_LONE_SPACE = "\ue000"  # private use: stands for a single space while the ends are stripped
_UNDECODABLE = "\ufffd"  # the decoder's sign for bytes that are no UTF-8 by themselves


def read_token_map(folder: Path, vocab_size: int, pad_token_id: int, num_expected: int) -> NDArray[np.int64]:
    """[vocab_size] compressed id of each token id of the folder's tokenizer.json. Raises ModelError.

    num_expected: how many compressed ids there must be; hashes depend on it.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{folder} has no tokenizer.json, which engram's hashes depend on")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{file} cannot be read: {error}") from error
    known, num_compressed = token_map(tokenizer)
    if num_compressed != num_expected:
        raise ModelError(
            f"{file} has {num_compressed} different tokens after normalisation, but config.json says"
            f" engram_compressed_vocab_size = {num_expected}: the tokenizer is not this model's"
        )
    if len(known) > vocab_size:
        raise ModelError(f"{file} has {len(known)} token ids, but config.json says vocab_size = {vocab_size}")
    # Ids without a token are never trained; a sampler might still draw one.
    padded = np.full(vocab_size, known[pad_token_id] if pad_token_id < len(known) else 0, dtype=np.int64)
    padded[: len(known)] = known
    return padded


def token_map(tokenizer: Tokenizer) -> tuple[NDArray[np.int64], int]:
    """(compressed id of each token id, number of compressed ids), numbered in the order of first appearance."""
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )
    numbers: dict[str, int] = {}
    compressed = np.empty(tokenizer.get_vocab_size(with_added_tokens=True), dtype=np.int64)
    for token_id in range(len(compressed)):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        if _UNDECODABLE in text:
            key = str(tokenizer.id_to_token(token_id))
        else:
            key = normalizer.normalize_str(text) or text
        compressed[token_id] = numbers.setdefault(key, len(numbers))
    return compressed, len(numbers)
