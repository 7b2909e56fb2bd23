"""Runs in the oracle's environment: drafts for FOLDER/tokens.txt by the checkpoints FOLDER/v4 and FOLDER/v41, in fp32.

usage: draft_oracle_worker.py FOLDER RESULT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import nemo_model  # beside this file
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

ANCHORS = [1, 2, 5, 7, 8, 9, 23, 39]  # positions of the token that a block begins with: around the window of 8
# config.json's keys that this package names the same; the rest it derives or knows under other names
_V4_KEYS = (
    *("vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("qk_rope_head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "n_routed_experts", "num_experts_per_tok"),
    *("routed_scaling_factor", "swiglu_limit", "max_position_embeddings", "rope_theta", "rope_scaling"),
    *("compress_rope_theta", "sliding_window", "hc_eps", "hc_mult", "hc_sinkhorn_iters", "index_head_dim"),
    *("index_n_heads", "index_topk", "num_nextn_predict_layers", "rms_norm_eps"),
)
_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 8}


def mtp(folder: Path, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Row i: the MTP layer's logits of position i, given the token at i + 1."""
    from nemo_automodel.components.models.deepseek_v4.config import DeepseekV4Config
    from nemo_automodel.components.models.deepseek_v4.model import DeepseekV4ForCausalLM

    raw = json.loads((folder / "config.json").read_text())
    ratios = [_RATIOS[kind] for kind in raw["layer_types"]] + [0]
    num_hash = raw["mlp_layer_types"].count("hash_moe")
    shared = {key: raw[key] for key in _V4_KEYS}
    config = DeepseekV4Config(**shared, compress_ratios=ratios, num_hash_layers=num_hash, dtype="float32")
    model = DeepseekV4ForCausalLM(config, backend=nemo_model.backend()).train()  # it drafts only in training
    nemo_model.load_weights(model, load_file(folder / "model.safetensors"))
    with torch.no_grad():
        hidden = model(tokens).mtp_per_depth_h[0]
        logits = F.linear(hidden.float(), model.lm_head.weight.float())
    return {"v4.logits": logits[0, :-1].contiguous()}


def dspark(folder: Path, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Blocks at the anchors: logits, greedy tokens, confidences (of the state before the last norm, as released)."""
    from nemo_automodel.components.models.deepseek_v41 import dspark as drafting

    nemo_model.keep_cache_unrounded()
    text = json.loads((folder / "config.json").read_text())["text_config"]
    model, weights = nemo_model.load_v41(folder, "float32"), load_file(folder / "model.safetensors")
    draft = drafting.DeepseekV41DSparkModel(
        model.config.text_config, nemo_model.backend(), num_anchors=1, enable_confidence_head=True
    ).eval()
    draft_weights = {name: weights[name] for name in weights if name.startswith(("mtp.", "embed.", "head."))}
    nemo_model.load_weights(draft, draft_weights)

    means: list[torch.Tensor] = []
    for module in model.get_dspark_target_feature_modules(text["dspark_target_layer_ids"]):
        module.register_forward_pre_hook(lambda _, inputs: means.append(inputs[0].mean(dim=2)))
    states: list[torch.Tensor] = []
    draft.mtp[-1].norm.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    size, anchors = text["dspark_block_size"], torch.tensor([ANCHORS])
    block = torch.full((1, len(ANCHORS), size), text["dspark_noise_token_id"])
    block[0, :, 0] = tokens[0, ANCHORS]
    with torch.no_grad():
        model(tokens)
        num_tokens = tokens.shape[1]
        mask = draft.build_attention_mask(
            anchors, torch.ones_like(anchors, dtype=torch.bool), num_tokens, torch.float32
        )
        output = drafting.DeepseekV41DSparkBackbone.forward(
            draft,
            draft.embed_tokens(block.flatten(1)),
            torch.cat(means, dim=-1),
            position_ids=draft.build_position_ids(anchors, num_tokens),
            attention_mask=mask,
        )
        base = draft.compute_logits(output.normalized_hidden_states).view(len(ANCHORS), size, -1)
        return heads(draft.mtp[-1], base, states[0].view(len(ANCHORS), size, -1), tokens[0, ANCHORS])


def heads(stage: Any, base: torch.Tensor, states: torch.Tensor, previous: torch.Tensor) -> dict[str, torch.Tensor]:
    columns = []
    for row in range(base.shape[1]):
        transition, embedded = stage.markov_head(previous)
        logits = base[:, row] + transition
        previous = logits.argmax(dim=1)
        columns.append((logits, previous, torch.sigmoid(stage.confidence_head(states[:, row], embedded))))
    names = ("v41.logits", "v41.drafts", "v41.confidences")
    found = (torch.stack(column, dim=1) for column in zip(*columns, strict=True))
    return dict(zip(names, found, strict=True))


def main(folder: Path, result: Path) -> None:
    nemo_model.prepare(num_threads=1)
    tokens = torch.tensor([[int(token) for token in (folder / "tokens.txt").read_text().split()]])
    found = {**mtp(folder / "v4", tokens), **dspark(folder / "v41", tokens)}
    save_file({"tokens": tokens[0], "v41.anchors": torch.tensor(ANCHORS), **found}, result)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
