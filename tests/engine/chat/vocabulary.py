"""A vocabulary with merges, learnt from a text: what a tiny model's bytes cannot show about where texts may be cut."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace_engine.chat.prompt import DSML, END_THINK, MARKERS, THINK

# Up to three digits; Chinese and Japanese runs; words with what precedes them; punctuation; white space.
_SPLITS = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_ORDINARY = (THINK, END_THINK, DSML)  # added tokens that published vocabularies do not call special


def write_vocabulary(folder: Path, texts: Iterable[str], size: int) -> None:
    """tokenizer.json into `folder`: byte-level BPE of `size` tokens and the chat's markers."""
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    special = [AddedToken(marker, normalized=False, special=True) for marker in MARKERS if marker not in _ORDINARY]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(marker, special=False) for marker in _ORDINARY])
    tokenizer.save(str(folder / "tokenizer.json"))
