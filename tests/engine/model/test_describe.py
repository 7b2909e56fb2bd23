"""`headrace-engine describe`: published sizes come out, and what it says of a checkpoint is what loading it takes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_engine import models
from headrace_engine.cli import main
from headrace_engine.kernels import Weight
from headrace_engine.kv.records import INDEX_68, KV_288, KV_528, CacheRecords
from headrace_engine.models.outline import CacheBytes, cache_bytes
from headrace_engine.models.protocol import CacheGroup, GroupKind, Holds, packed_groups
from headrace_engine.models.tiny import write_tiny

V4_FLASH: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "vocab_size": 129280,
    "num_attention_heads": 64,
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
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "moe_intermediate_size": 2048,
    "max_position_embeddings": 1048576,
}


def described(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["describe", "-o", "json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def flash(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(V4_FLASH))
    return str(tmp_path)


def test_the_published_cache_sizes_of_v4_flash(flash: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = described(capsys, flash)["cache_bytes"]
    assert [row["cache_dtype"] for row in rows] == ["auto", "fp8", "fp4"]
    sizes = {row["format"]: row for row in rows}
    assert {name: row["bytes_per_token"] for name, row in sizes.items()} == {
        "bfloat16": 6880,
        "fp8-584 + fp8-132": 3850.25,
        "fp8-584 + mxfp4-68": 3514.25,
    }
    assert sizes["bfloat16"]["window_bytes_per_sequence"] == 5_636_096
    assert sizes["fp8-584 + mxfp4-68"]["window_bytes_per_sequence"] == 3_214_336
    assert {row["carry_bytes_per_sequence"] for row in sizes.values()} == {21 * 8 * 4 * 4 * (512 + 128) + 20 * 524_288}


def test_the_published_weights_of_v4_flash(flash: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = described(capsys, flash, "--data", "8", "--expert-parallel")
    assert round(found["num_parameters"] / 1e9) == 284
    weights = found["weights"]
    assert not weights["are_here"]
    assert weights["num_experts_per_rank"] == 32
    one_expert = 3 * 4096 * 2048  # elements; half a byte each, and a scale byte for 32
    assert weights["rank_stored_bytes"]["experts"] == 43 * 32 * one_expert * (16 + 1) // 32
    assert weights["rank_memory_bytes"]["experts"] == 43 * 32 * one_expert * 2
    assert weights["rank_memory_fp4_bytes"]["experts"] == weights["rank_stored_bytes"]["experts"]
    assert weights["rank_memory_fp4_bytes"]["shared"] == weights["rank_memory_bytes"]["shared"]
    whole = described(capsys, flash)["weights"]
    assert whole["rank_stored_bytes"]["experts"] == 8 * weights["rank_stored_bytes"]["experts"]
    assert whole["rank_stored_bytes"]["shared"] == weights["rank_stored_bytes"]["shared"]


@pytest.mark.parametrize(("compressed", "per_token"), [(KV_288, 890), (KV_528, 1490)])
def test_the_published_cache_sizes_of_v41_flash(compressed: Any, per_token: float) -> None:
    """Its cache: entries and keys of layers 2, 8, 14 (one for two tokens) and 20 (one each), a window in all 40."""
    paged, state, every = GroupKind.PAGED, GroupKind.STATE, tuple(range(40))
    groups = [CacheGroup("window", state, every, 512, "bfloat16", rows=128, holds=Holds.WINDOW)]
    for name, layers, ratio in (("pairs", (2, 8, 14), 2), ("single", (20,), 1)):
        groups += [
            CacheGroup(f"{name}_kv", paged, layers, 512, "bfloat16", ratio, holds=Holds.COMPRESSED),
            CacheGroup(f"{name}_index", paged, layers, 128, "bfloat16", ratio, holds=Holds.INDEX_KEY),
        ]
    assert cache_bytes(groups) == CacheBytes(3200, 5_242_880, 0)
    packed = packed_groups(groups, CacheRecords(KV_528, compressed, INDEX_68))
    assert cache_bytes(packed) == CacheBytes(per_token, 2_703_360, 0)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Every tensor that a part of the model owns."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Weight):
        yield value.data
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif hasattr(value, "weights") and hasattr(value, "compressor"):  # attention
        for part in (value.weights, value.compressor, value.index_compressor):
            yield from tensors_in(part)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_memory_of_a_rank_is_that_of_the_loaded_model(
    tiny_path: Path, capsys: pytest.CaptureFixture[str], dtype: str, num_ranks: int
) -> None:
    model = models.load(tiny_path, rank=0, num_ranks=num_ranks, expert_parallel=num_ranks > 1, dtype=dtype)
    parts = (model.embedding, model.head, model.norm, model.head_hc, *model.layers)
    num_bytes = sum(tensor.nbytes for part in parts for tensor in tensors_in(part))
    options = ["--data", str(num_ranks), *["--expert-parallel"][: num_ranks - 1], "--dtype", dtype]
    assert described(capsys, str(tiny_path), *options)["weights"]["rank_memory_bytes"]["total"] == num_bytes


@pytest.mark.parametrize(
    "chosen",
    [
        {"cache_dtype": "bfloat16"},
        {"cache_dtype": "fp8"},
        {"cache_dtype": "fp4"},
        {"dtype": "bfloat16"},  # which the cache then has too
    ],
    ids=str,
)
def test_the_cache_groups_are_those_of_the_loaded_model(
    tiny_path: Path, capsys: pytest.CaptureFixture[str], chosen: dict[str, str]
) -> None:
    model = models.load(tiny_path, **chosen)
    options = [word for name, value in chosen.items() for word in (f"--{name.replace('_', '-')}", value)]
    groups = described(capsys, str(tiny_path), *options)["cache_groups"]
    assert [group["name"] for group in groups] == [group.name for group in model.cache_groups]
    assert [group["bytes_per_entry"] for group in groups] == [group.bytes_per_entry for group in model.cache_groups]


def test_stored_bytes_are_those_of_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny(tmp_path, quantized=True)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    found = described(capsys, str(tmp_path))
    weights, drafter = found["weights"], found["drafter"]
    assert weights["are_here"]
    assert drafter["are_here"]
    totals = [part["rank_stored_bytes"]["total"] for part in (weights, drafter)]
    assert sum(totals) == index["metadata"]["total_size"]
    published = models.outline_of(tmp_path)
    assert published.drafter is not None
    tensors = [published.tensors, published.drafter.tensors]
    assert totals == [sum(t.published_bytes(published.fp8_block) for t in part) for part in tensors]


DRAFTERS = [  # of the published checkpoints: what they say, and kind, layers, tokens at once, experts, ring
    ({"num_nextn_predict_layers": 1}, ("mtp", 1, 1, 256, 128)),
    (
        {
            "num_nextn_predict_layers": 1,
            "dspark_block_size": 5,
            "dspark_noise_token_id": 128799,
            "dspark_target_layer_ids": [40, 41, 42],
            "dspark_markov_rank": 256,
        },
        ("dspark", 3, 5, 256, 128),
    ),
]


@pytest.mark.parametrize(("keys", "expected"), DRAFTERS, ids=["April", "0731"])
def test_the_drafters_of_v4_flash(
    keys: dict[str, Any], expected: tuple[Any, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**V4_FLASH, **keys}))
    drafter = described(capsys, str(tmp_path), "--data", "8", "--expert-parallel")["drafter"]
    (group,) = drafter["cache_groups"]
    found = [drafter[key] for key in ("kind", "num_layers", "num_drafts", "num_experts")]
    assert (*found, group["rows"]) == expected
    assert group["layers"] == list(range(drafter["num_layers"]))
    experts = drafter["num_layers"] * 256 * 3 * 4096 * 2048
    assert drafter["rank_stored_bytes"]["experts"] == experts // 8 * (16 + 1) // 32
    assert 0 < drafter["num_parameters"] - experts < 1e9


def test_a_checkpoint_without_a_drafter_has_none(flash: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert described(capsys, flash)["drafter"] is None


def test_a_table_for_people(tiny_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", str(tiny_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("deepseek_v4: 1,375,289 parameters, 6 layers (2 sliding_attention, ")
    assert "csa_kv compressed 2 1 / 4 tokens 128 each block once it is complete" in [
        " ".join(line.split()) for line in lines
    ]
    assert "drafter mtp: 227,191 parameters, 1 layers of 8 experts, 1 tokens at once; not used yet" in lines


def test_bad_input_is_refused_with_the_reason(
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_bytes((tiny_path / "config.json").read_bytes())
    cut.write_bytes((tiny_path / "model.safetensors").read_bytes()[:300_000])
    assert main(["describe", str(tmp_path)]) == 2
    assert "is damaged or incomplete: tensor" in capsys.readouterr().err
    assert main(["describe", str(tiny_path), "--data", "3", "--expert-parallel"]) == 2
    assert "8 experts do not split over 3 ranks" in capsys.readouterr().err
    assert main(["describe", str(tmp_path / "absent")]) == 2
    assert "does not exist" in capsys.readouterr().err
