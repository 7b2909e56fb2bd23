"""Loads our checkpoints into NeMo AutoModel's models. Imported in its environment only (see nemo.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def prepare(num_threads: int) -> None:
    """Once for each process, before anything is loaded."""
    torch.compiler.set_stance("force_eager")  # its activation is a compiled graph, which needs no compiler this way
    torch.set_num_threads(num_threads)


def backend(experts: str = "torch") -> Any:
    """What runs on a CPU. `experts`: "torch" takes them one by one, "torch_mm" all in one grouped product."""
    from nemo_automodel.components.models.common import BackendConfig

    return BackendConfig(
        attn="eager",
        linear="torch",
        rms_norm="torch_fp32",
        rope="torch",
        rope_fusion=False,
        experts=experts,
        dispatcher="torch",
    )


_OF_IMAGES = ("model.vision", "model.aligner", "model.image_")


def load_weights(module: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Published names. Raises SystemExit unless they are all that the text's model needs, and nothing else."""
    missing, unexpected = module.load_state_dict(module.state_dict_adapter.from_hf(weights), strict=False)
    missing = [name for name in missing if ".vision" not in name and not name.startswith(_OF_IMAGES)]
    missing = [name for name in missing if not name.endswith("bias_vl")]  # how images choose experts
    if missing or unexpected:
        raise SystemExit(f"missing {missing}, unexpected {unexpected}")


def load_v41(folder: Path, dtype: str, experts: str = "torch") -> torch.nn.Module:
    """The DeepSeek-V4.1 of a folder, without its drafter, computing in `dtype`."""
    from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config
    from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM
    from transformers import PreTrainedTokenizerFast

    text = json.loads((folder / "config.json").read_text())["text_config"]
    config = DeepseekV41Config(
        text_config={**text, "dtype": dtype}, vision_config={"num_hidden_layers": 0}, dtype=dtype
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    model = DeepseekV41ForCausalLM(config, backend=backend(experts), tokenizer=tokenizer).eval()
    weights = load_file(folder / "model.safetensors")
    load_weights(model, {name: tensor for name, tensor in weights.items() if not name.startswith("mtp.")})
    return model


def keep_cache_unrounded() -> None:
    """It rounds the cache as training does; a plain comparison has no use for that."""
    from nemo_automodel.components.models.deepseek_v41 import attention, dspark

    for module in (attention, dspark):
        module.quantize_cache = lambda values, **_: values
