"""Checkpoints of DeepSeek-V4.1: what is left out, what is missed, the published number formats, a rank's share."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.engine.model.harness import PagedRun, assert_close, random_tokens
from tests.engine.model.test_quantized import dequantized

from headrace_engine import models
from headrace_engine.models import ModelError
from headrace_engine.models.deepseek_v41.model import DeepseekV41
from headrace_engine.models.tiny import write_tiny

TOKENS = random_tokens(40, seed=9)


@pytest.fixture
def copy(tiny_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_path, tmp_path / "copy"))


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path / "model.safetensors")


def test_image_and_draft_tensors_are_left_out_with_a_note(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    more = {
        name: torch.ones(3)
        for name in ("vision.patch.weight", "aligner.w1.weight", "image_start", "layers.0.ffn.gate.bias_vl")
    }
    rewrite(copy, lambda weights: weights.update(more | {"mtp.0.main_norm.weight": torch.ones(3)}))
    with caplog.at_level(logging.INFO):
        models.load(copy)
    assert "4 image tensors are not loaded: only text is served" in caplog.text


def test_missing_and_unexpected_tensors_are_named(copy: Path) -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["layers.8.attn.compressor.wkv.weight"] = weights.pop("layers.6.attn.compressor.wkv.weight")

    rewrite(copy, change)
    with pytest.raises(ModelError, match=r"missing: layers\.6\.attn\.c.*unexpected: layers\.8\.attn\.compressor\.wkv"):
        models.load(copy)


def test_published_number_formats_give_the_model_that_the_numbers_stand_for(tiny_path: Path, tmp_path: Path) -> None:
    write_tiny(tmp_path / "published", family="v41", seed=0, quantized=True)
    stored: dict[str, torch.Tensor] = {}
    for file in sorted((tmp_path / "published").glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            stored.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118 - not a mapping
    assert stored["layers.1.engram.embed.weight"].dtype is torch.float8_e4m3fn
    assert stored["layers.1.engram.embed.scale"].shape == (667, 1)
    plain = Path(shutil.copytree(tiny_path, tmp_path / "plain"))
    save_file(
        {name: tensor.contiguous() for name, tensor in dequantized(stored, fp8_block=(32, 32)).items()},
        plain / "model.safetensors",
    )
    published = models.load(tmp_path / "published", dtype="float32", cache_dtype="float32")
    assert torch.equal(PagedRun(published).prompt(TOKENS), PagedRun(models.load(plain)).prompt(TOKENS))


def test_in_bf16_the_answer_does_not_depend_on_how_the_prompt_is_cut(tiny_path: Path) -> None:
    model = models.load(tiny_path, dtype="float32", cache_dtype="bfloat16")
    whole = PagedRun(model).prompt(TOKENS)
    # An entry between two numbers of bf16 may become either one, which moves logits by up to 3e-3.
    assert_close(PagedRun(model).prompt(TOKENS, [1]), whole, tolerance=1e-2)
    assert bool(PagedRun(models.load(tiny_path, dtype="bfloat16")).prompt(TOKENS).isfinite().all())


def test_a_rank_holds_its_own_experts(tiny_path: Path) -> None:
    half = models.load(tiny_path, rank=1, num_ranks=2, expert_parallel=True)
    whole = models.load(tiny_path)
    assert isinstance(half, DeepseekV41)
    assert isinstance(whole, DeepseekV41)
    assert torch.equal(half.layers[0].moe.w13.plain(), whole.layers[0].moe.w13.plain()[4:])
    assert half.digest == whole.digest
