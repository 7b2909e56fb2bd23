"""Runs in the oracle's environment: logits of each checkpoint folder's tokens.txt, by NeMo AutoModel in fp32 on a CPU.

Twice: with the cache rounded as in training (`rounded_logits`), and without (`logits`).

usage: v41_oracle_worker.py RESULT FOLDER...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def logits(folder: Path) -> dict[str, torch.Tensor]:
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.deepseek_v41 import attention
    from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config
    from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM
    from transformers import PreTrainedTokenizerFast

    config = DeepseekV41Config(
        text_config={**json.loads((folder / "config.json").read_text())["text_config"], "dtype": "float32"},
        vision_config={"num_hidden_layers": 0},
        dtype="float32",
    )
    backend = BackendConfig(
        attn="eager",
        linear="torch",
        rms_norm="torch_fp32",
        rope="torch",
        rope_fusion=False,
        experts="torch",
        dispatcher="torch",
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    model = DeepseekV41ForCausalLM(config, backend=backend, tokenizer=tokenizer).eval()
    weights = load_file(folder / "model.safetensors")
    for layer in range(config.text_config.num_hidden_layers):  # of images, which the text never uses
        weights[f"layers.{layer}.ffn.gate.bias_vl"] = torch.zeros(config.text_config.n_routed_experts)
    missing, unexpected = model.load_state_dict(model.state_dict_adapter.from_hf(weights), strict=False)
    missing = [name for name in missing if not name.startswith(("model.vision", "model.aligner", "model.image_"))]
    if missing or unexpected:
        raise SystemExit(f"{folder}: missing {missing}, unexpected {unexpected}")
    tokens = torch.tensor([[int(token) for token in (folder / "tokens.txt").read_text().split()]])
    rounds = attention.quantize_cache
    results = {}
    for name, quantize in (("rounded_logits", rounds), ("logits", lambda values, **_: values)):
        attention.quantize_cache = quantize
        with torch.inference_mode():
            results[f"{folder.name}.{name}"] = model(tokens).logits[0].float().contiguous()
    attention.quantize_cache = rounds
    return {f"{folder.name}.tokens": tokens[0], **results}


def main(result: Path, folders: list[Path]) -> None:
    torch.compiler.set_stance("force_eager")  # its activation is a compiled graph, which needs no compiler this way
    torch.set_num_threads(1)
    tensors: dict[str, torch.Tensor] = {}
    for folder in folders:
        tensors.update(logits(folder))
    save_file(tensors, result)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
