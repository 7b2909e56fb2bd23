"""config.json in its published and its rewritten form, and what is refused."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV4Config

from headrace_engine import models
from headrace_engine.models import ModelError
from headrace_engine.models.config_values import Yarn
from headrace_engine.models.deepseek_v4.cache import cache_groups
from headrace_engine.models.deepseek_v4.config import LayerKind, parse
from headrace_engine.models.deepseek_v4.tiny import TINY_CONFIG

PUBLISHED: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "max_position_embeddings": 1048576,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "num_hash_layers": 3,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 1,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}


def test_the_published_form() -> None:
    config = parse(PUBLISHED)
    assert config.num_layers == 43
    assert len(config.layers_of(LayerKind.CSA)) == 21
    assert len(config.layers_of(LayerKind.HCA)) == 20
    assert config.hash_layers == (True, True, True) + (False,) * 40
    assert config.compressed_rope.yarn == Yarn(16.0, 65536, 32.0, 1.0)
    assert config.window_rope.yarn is None
    assert (config.block_multiple, config.dtype, config.rope_dim) == (128, "bfloat16", 64)


@pytest.mark.parametrize("source", [PUBLISHED, TINY_CONFIG], ids=["published", "tiny"])
def test_the_form_that_transformers_rewrites_means_the_same(source: dict[str, Any], tmp_path: Path) -> None:
    DeepseekV4Config(**copy.deepcopy(source)).save_pretrained(tmp_path)  # it changes nested values
    rewritten = json.loads((tmp_path / "config.json").read_text())
    assert "compress_ratios" not in rewritten
    assert parse(rewritten) == parse(source)
    rewritten.pop("qk_rope_head_dim", None)  # some versions keep only the factor
    assert parse(rewritten) == parse(source)


def test_cache_bytes_per_token_of_the_published_model() -> None:
    """6,880 bytes a token over the long range, and 43 windows of 128 rows, in bf16."""
    groups = {group.name: group for group in cache_groups(parse(PUBLISHED), "bfloat16")}
    per_token = sum(math.prod(group.item_shape(128)) * 2 / 128 for group in groups.values() if group.kind == "paged")
    assert per_token == 6880
    assert math.prod(groups["window"].item_shape(128)) * 2 == 5_636_096


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config\.quant_method = 'gptq' is not"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, r"quantization_config\.fmt = 'e5m2' is not"),
        ({"quantization_config": "fp8"}, "quantization_config must be an object"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' is not supported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"layer_types": ["full_attention"] * 6}, "layer_types"),
        ({"layer_types": ["sliding_attention"]}, "layer_types has 1 items for 6 layers"),
        ({"layer_types": None}, "neither compress_ratios nor layer_types"),
        ({"layer_types": None, "compress_ratios": [0, 8, 0, 0, 0, 0]}, r"may hold 0, 4 and 128, got \[8\]"),
        ({"mlp_layer_types": ["dense"] * 6}, "mlp_layer_types"),
        ({"hidden_size": 0}, "hidden_size must be a positive integer, got 0"),
        ({"hidden_size": "96"}, "hidden_size must be a positive integer, got '96'"),
        ({"hidden_size": 90}, "multiples of 8"),
        ({"o_groups": 3}, "4 heads do not split into 3 o_groups"),
        ({"num_experts_per_tok": 9}, "larger than n_routed_experts"),
        ({"qk_rope_head_dim": 18}, "rotary dims"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope type 'linear' is not supported"),
        ({"rope_scaling": {"type": "yarn"}}, "factor must be a number"),
        ({"dtype": "float16"}, "dtype 'float16' is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse({**TINY_CONFIG, **change})


def test_the_description_needs_neither_weights_nor_torch(tiny_path: Path) -> None:
    code = (
        "import sys; from headrace_engine import models; info = models.describe_config(sys.argv[1]);"
        "assert 'torch' not in sys.modules; print(info.max_position, info.eos_token_ids, info.block_multiple)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split("\n")[0] == "8192 (1,) 8"


@pytest.mark.parametrize(("content", "message"), [("{", "cannot be read as JSON"), ("[]", "must hold a JSON object")])
def test_a_broken_config_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        models.describe_config(tmp_path)


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        models.describe_config(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"no config\.json"):
        models.describe_config(tmp_path)
