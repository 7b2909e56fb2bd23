"""Writes the benchmark model: a small random DeepSeek-V4 checkpoint that both we and vLLM's CPU build accept.

Small enough for two cores (50.8 million parameters, bf16), yet with every mechanism of the architecture: plain
window layers, CSA layers (ratio 4, with indexer), HCA layers (ratio 128), hash-routed and biased MoE layers,
hyper-connections. 64 index heads x 128 and 64 experts with 6 active are the smallest numbers that vLLM's CPU kernels
take. Values are random but scaled so that activations stay in range through all layers; the tokens mean nothing, the
work per token is real.

Run `python -m tests.bench.checkpoint DIR` from the root of the repository.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 512
HIDDEN = 256
NUM_HEADS, HEAD_DIM, ROPE_DIM = 8, 512, 64
QUERY_RANK = 128
NUM_OUTPUT_GROUPS, OUTPUT_RANK = 2, 128
NUM_INDEX_HEADS, INDEX_HEAD_DIM, INDEX_TOP_K = 64, 128, 512
NUM_EXPERTS, EXPERTS_PER_TOKEN, EXPERT_HIDDEN = 64, 6, 128
NUM_STREAMS = 4  # hyper-connection streams
COMPRESS_RATIOS = (0, 0, 4, 128, 4, 128)  # one per layer; 0 is a plain window layer
NUM_HASH_LAYERS = 2  # leading MoE layers that route by token id
CSA_RATIO = 4
MAX_POSITION = 32768
SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>", "<unk>")  # ids 0 to 3; the 256 bytes follow

Weights = dict[str, torch.Tensor]


class _Values:
    """A reproducible stream of random tensors: the same seed and the same calls give the same bytes."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.Generator(np.random.PCG64(seed))

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.tensor(self._random.standard_normal(shape, dtype=np.float32))

    def matrix(self, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """A projection [rows, columns] that maps unit-variance input to a standard deviation of 1.5."""
        return self.spread(rows, columns, deviation=1.5 / columns**0.5, dtype=dtype)

    def spread(self, *shape: int, deviation: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (self._normal(*shape) * deviation).to(dtype)

    def norm(self, size: int) -> torch.Tensor:
        return (1 + 0.1 * self._normal(size)).to(torch.bfloat16)

    def experts_by_token(self) -> torch.Tensor:
        """The hash layers' table [vocabulary, experts per token]: distinct experts for every token id."""
        rows = [self._random.permutation(NUM_EXPERTS)[:EXPERTS_PER_TOKEN] for _ in range(VOCAB_SIZE)]
        return torch.from_numpy(np.stack(rows).astype(np.int32))


def _compressor(values: _Values, prefix: str, ratio: int, head_dim: int) -> Weights:
    # CSA blends each group of tokens with the one before, so it projects to two sets of rows.
    rows = head_dim * (2 if ratio == CSA_RATIO else 1)
    return {
        f"{prefix}.wkv.weight": values.matrix(rows, HIDDEN),
        f"{prefix}.wgate.weight": values.matrix(rows, HIDDEN),
        f"{prefix}.ape": values.spread(ratio, rows, deviation=0.5),
        f"{prefix}.norm.weight": values.norm(head_dim),
    }


def _attention(values: _Values, prefix: str, ratio: int) -> Weights:
    width = NUM_HEADS * HEAD_DIM
    weights = {
        f"{prefix}.wq_a.weight": values.matrix(QUERY_RANK, HIDDEN),
        f"{prefix}.q_norm.weight": values.norm(QUERY_RANK),
        f"{prefix}.wq_b.weight": values.matrix(width, QUERY_RANK),
        f"{prefix}.wkv.weight": values.matrix(HEAD_DIM, HIDDEN),
        f"{prefix}.kv_norm.weight": values.norm(HEAD_DIM),
        f"{prefix}.wo_a.weight": values.matrix(NUM_OUTPUT_GROUPS * OUTPUT_RANK, width // NUM_OUTPUT_GROUPS),
        f"{prefix}.wo_b.weight": values.matrix(HIDDEN, NUM_OUTPUT_GROUPS * OUTPUT_RANK),
        f"{prefix}.attn_sink": values.spread(NUM_HEADS, deviation=0.5),
    }
    if ratio:
        weights |= _compressor(values, f"{prefix}.compressor", ratio, HEAD_DIM)
    if ratio == CSA_RATIO:
        weights[f"{prefix}.indexer.wq_b.weight"] = values.matrix(NUM_INDEX_HEADS * INDEX_HEAD_DIM, QUERY_RANK)
        weights[f"{prefix}.indexer.weights_proj.weight"] = values.matrix(NUM_INDEX_HEADS, HIDDEN)
        weights |= _compressor(values, f"{prefix}.indexer.compressor", ratio, INDEX_HEAD_DIM)
    return weights


def _experts(values: _Values, prefix: str, *, hashed: bool) -> Weights:
    weights = {f"{prefix}.gate.weight": values.matrix(NUM_EXPERTS, HIDDEN)}
    if hashed:
        weights[f"{prefix}.gate.tid2eid"] = values.experts_by_token()
    else:
        weights[f"{prefix}.gate.bias"] = values.spread(NUM_EXPERTS, deviation=0.5)
    for name in (*(f"experts.{i}" for i in range(NUM_EXPERTS)), "shared_experts"):
        weights[f"{prefix}.{name}.w1.weight"] = values.matrix(EXPERT_HIDDEN, HIDDEN)
        weights[f"{prefix}.{name}.w3.weight"] = values.matrix(EXPERT_HIDDEN, HIDDEN)
        weights[f"{prefix}.{name}.w2.weight"] = values.matrix(HIDDEN, EXPERT_HIDDEN)
    return weights


def _hyper_connection(values: _Values, prefix: str, num_outputs: int, num_scales: int) -> Weights:
    return {
        f"{prefix}_fn": values.matrix(num_outputs, NUM_STREAMS * HIDDEN, torch.float32),
        f"{prefix}_base": values.spread(num_outputs, deviation=0.5),
        f"{prefix}_scale": torch.ones(num_scales),
    }


def make_weights(seed: int = 1) -> Weights:
    """Every tensor of the model under its published name."""
    values = _Values(seed)
    weights = {
        "embed.weight": values.spread(VOCAB_SIZE, HIDDEN, deviation=0.3, dtype=torch.bfloat16),
        "norm.weight": values.norm(HIDDEN),
        "head.weight": values.matrix(VOCAB_SIZE, HIDDEN),
    }
    # A sublayer mixes N streams: N inputs, N outputs and an N x N matrix between streams.
    num_mixes = (2 + NUM_STREAMS) * NUM_STREAMS
    for layer, ratio in enumerate(COMPRESS_RATIOS):
        prefix = f"layers.{layer}"
        weights[f"{prefix}.attn_norm.weight"] = values.norm(HIDDEN)
        weights[f"{prefix}.ffn_norm.weight"] = values.norm(HIDDEN)
        weights |= _attention(values, f"{prefix}.attn", ratio)
        weights |= _experts(values, f"{prefix}.ffn", hashed=layer < NUM_HASH_LAYERS)
        for sublayer in ("attn", "ffn"):
            weights |= _hyper_connection(values, f"{prefix}.hc_{sublayer}", num_mixes, 3)
    return weights | _hyper_connection(values, "hc_head", NUM_STREAMS, 1)


def make_config() -> dict[str, Any]:
    """config.json as the published checkpoints write it."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "num_hidden_layers": len(COMPRESS_RATIOS),
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "qk_rope_head_dim": ROPE_DIM,
        "q_lora_rank": QUERY_RANK,
        "o_groups": NUM_OUTPUT_GROUPS,
        "o_lora_rank": OUTPUT_RANK,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": 128,
        "compress_ratios": list(COMPRESS_RATIOS),
        "index_n_heads": NUM_INDEX_HEADS,
        "index_head_dim": INDEX_HEAD_DIM,
        "index_topk": INDEX_TOP_K,
        "n_routed_experts": NUM_EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "moe_intermediate_size": EXPERT_HIDDEN,
        "num_hash_layers": NUM_HASH_LAYERS,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "hc_mult": NUM_STREAMS,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": MAX_POSITION,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 4,
            "original_max_position_embeddings": 8192,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "num_nextn_predict_layers": 0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def _vocabulary() -> Iterator[str]:
    """Token strings in the order of their ids; ids past the bytes are fillers that no text produces."""
    yield from SPECIAL_TOKENS
    yield from sorted(pre_tokenizers.ByteLevel.alphabet())
    yield from (f"<filler{i}>" for i in range(len(SPECIAL_TOKENS) + 256, VOCAB_SIZE))


def make_tokenizer() -> Tokenizer:
    """One token a byte, no merges."""
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(_vocabulary())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def write_checkpoint(directory: Path, seed: int = 1) -> int:
    """Write a complete checkpoint folder and return its number of parameters; the same seed writes the same bytes.

    config.json comes last: a folder that has it is whole.
    """
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.contiguous() for name, tensor in make_weights(seed).items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer().save(str(directory / "tokenizer.json"))
    bos, eos, pad, unknown = SPECIAL_TOKENS
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "unk_token": unknown,
        "model_max_length": MAX_POSITION,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
    files = {
        "tokenizer_config.json": tokenizer_config,
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1},
        "config.json": make_config(),
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=1) + "\n")
    return sum(tensor.numel() for tensor in weights.values())


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the benchmark model.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    num_parameters = write_checkpoint(arguments.directory, arguments.seed)
    print(f"{arguments.directory}: {num_parameters / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
