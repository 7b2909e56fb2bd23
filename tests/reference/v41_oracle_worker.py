"""Runs in the oracle's environment: logits of each checkpoint folder's tokens.txt, by NeMo AutoModel in fp32 on a CPU.

Twice: with the cache rounded as in training (`rounded_logits`), and without (`logits`).

usage: v41_oracle_worker.py RESULT FOLDER...
"""

from __future__ import annotations

import sys
from pathlib import Path

import nemo_model  # beside this file
import torch
from safetensors.torch import save_file


def logits(folder: Path) -> dict[str, torch.Tensor]:
    from nemo_automodel.components.models.deepseek_v41 import attention

    model = nemo_model.load_v41(folder, "float32")
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
    nemo_model.prepare(num_threads=1)
    tensors: dict[str, torch.Tensor] = {}
    for folder in folders:
        tensors.update(logits(folder))
    save_file(tensors, result)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
