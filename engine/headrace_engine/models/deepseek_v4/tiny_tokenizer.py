"""The tokenizer of the tiny model: one token per byte, and DeepSeek-V4's chat markers."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# Bars are U+FF5C and the underscore is U+2581, as in the published vocabulary.
_SPECIAL = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜System｜>",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
)
_VISIBLE = ("<think>", "</think>", "｜DSML｜")  # single tokens, but part of the text that a client sees
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
NOISE_ID = _SPECIAL.index("<｜System｜>")  # stands for tokens not yet drafted, as in V4.1's vocabulary
FIRST_BYTE_ID = len(_SPECIAL) + len(_VISIBLE)
VOCAB_SIZE = FIRST_BYTE_ID + 256


def byte_token_ids() -> dict[int, int]:
    """Byte value -> token id."""
    return {value: FIRST_BYTE_ID + index for index, value in enumerate(_alphabet())}


def write_tokenizer(path: Path, max_position: int) -> None:
    """tokenizer.json and tokenizer_config.json into the folder `path`; the same bytes each time."""
    alphabet = _alphabet()
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL, *_VISIBLE, *alphabet.values()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in _SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in _VISIBLE])
    _write_json(path / "tokenizer.json", json.loads(tokenizer.to_str()))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": _SPECIAL[BOS_ID],
            "eos_token": _SPECIAL[EOS_ID],
            "pad_token": _SPECIAL[PAD_ID],
            "model_max_length": max_position,
            "clean_up_tokenization_spaces": False,
            # Random weights never end a thought, and an effort in words is long in bytes.
            "chat_template_kwargs": {"thinking": False},
        },
    )


def _alphabet() -> dict[int, str]:
    """Byte value -> the character that byte-level BPE writes for it: itself if printable, else one past U+00FF."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [value for value in range(256) if value not in set(printable)]
    letters = {value: chr(value) for value in printable}
    letters.update({value: chr(0x100 + index) for index, value in enumerate(hidden)})
    return dict(sorted(letters.items()))


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
