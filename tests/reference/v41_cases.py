"""The small DeepSeek-V4.1 models whose logits an independent implementation has computed (v41_oracle.py).

Their weights come from seeds, so that only tokens and expected logits are kept in a file (v41_expected.safetensors).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headrace_engine.models.deepseek_v41.tiny import write_checkpoint

EXPECTED = Path(__file__).parent / "v41_expected.safetensors"
NUM_TOKENS = 61  # causal: the logits of one text are those of a prompt of every length up to this

_SPECIAL = ("<bos>", "<eos>", "<pad>")
_WORDS = (  # what normalisation folds together, and what it must keep apart
    *("the", "The", " the", "THE", "été", "Ete", "ÉTÉ", "ﬁn", "fin", "①", "1", "ａ", "ΟΔΟΣ", "οδοσ", "οδος", "ß", "ss"),
    *(" ", "  ", "\n", "\t \n", " \u3000", "\u3000", "\u00a0", "\v", "a b", "a\tb", "a \n b", "日本", "か\u3099", "が"),
)

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 24,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 40,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 6,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 4,
    "candidate_source_layer_id": -1,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 4,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 1.0,  # low, so that it cuts
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-20,
    "engram_layer_ids": [],
    "engram_num_embeddings": [],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 3,
    "engram_head_dim": 8,
    "engram_vocab_size": 53,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "num_nextn_predict_layers": 0,
}

CASES: dict[str, dict[str, Any]] = {
    "every_mode": {
        "compress_ratios": [0, 2, 2, 2, 2, 1, 1, 1],
        "kv_source_layer_ids": [1, 3, 5],
        "index_source_layer_ids": [1, 2, 3, 5, 7],
        "candidate_source_layer_id": 5,
        "engram_layer_ids": [1, 4],
        "engram_num_embeddings": [640, 1100],
    },
    "candidates": {  # blocks that do not divide the text, two that choose among them, a wider choice than a block
        "compress_ratios": [0, 1, 1, 1, 1],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1, 2, 4],
        "candidate_source_layer_id": 1,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 3,
        "index_topk": 7,
    },
    "longer_groups": {
        "compress_ratios": [0, 0, 3, 3, 4, 4],
        "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 3, 4],
        "engram_layer_ids": [0],
        "engram_num_embeddings": [390],
        "engram_max_ngram_size": 3,
        "swiglu_limit": 10.0,
    },
}


def make_tokenizer() -> Tokenizer:
    """Byte-level tokens of which many differ only in case, accents, form or white space."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [to_bytes.pre_tokenize_str(word)[0][0] for word in _WORDS]
    tokens = dict.fromkeys([*_SPECIAL, *words, *alphabet[:110]])
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = to_bytes, decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in _SPECIAL])
    return tokenizer


def case_config(name: str, num_compressed: int, num_known: int) -> dict[str, Any]:
    """config.json of a case, whose tokenizer has num_known ids and num_compressed different tokens."""
    text = {**_BASE, **CASES[name]}
    text["num_hidden_layers"] = len(text["compress_ratios"])
    text["vocab_size"] = num_known + 3  # some ids have no token
    text["engram_compressed_vocab_size"] = num_compressed
    text["engram_pad_token_id"] = num_known - 1  # its number is another than its id
    return {"model_type": "deepseek_v41", "dtype": "float32", "text_config": text, "vision_config": {}}


def write_case(folder: Path, name: str, num_compressed: int) -> dict[str, Any]:
    """The case's checkpoint folder with its tokenizer; its config."""
    tokenizer = make_tokenizer()
    config = case_config(name, num_compressed, tokenizer.get_vocab_size(with_added_tokens=True))
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder, config, seed=7)
    tokenizer.save(str(folder / "tokenizer.json"))
    return config


def case_tokens(name: str) -> list[int]:
    """The text: every token is likely to come again, so that n-grams repeat."""
    rng = random.Random(name)
    words = [rng.randrange(len(_SPECIAL), 40) for _ in range(20)]
    return [rng.choice(words) for _ in range(NUM_TOKENS)]
