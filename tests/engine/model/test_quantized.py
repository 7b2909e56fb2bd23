"""Checkpoints in the published number formats: loaded, they are exactly the model that their numbers stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.engine.model.harness import PagedRun, random_tokens

from headrace_engine import models
from headrace_engine.cli import main
from headrace_engine.kernels import Fp4Stack, Fp4Weight, Weight
from headrace_engine.models import ModelError

TOKENS = random_tokens(40, seed=9)
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def quantized_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-v4-quantized")
    assert main(["tiny", "--family", "v4", "--quantized", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def stored(quantized_path: Path) -> Weights:
    weights: Weights = {}
    for file in sorted(quantized_path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            weights.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118 - not a mapping
    return weights


def one_file(quantized_path: Path, folder: Path, weights: Weights) -> Path:
    """A folder with the same config.json and all the weights in one file."""
    (folder / "config.json").write_bytes((quantized_path / "config.json").read_bytes())
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def dequantized(weights: Weights, fp8_block: tuple[int, int] = (128, 128)) -> Weights:
    """Plain fp32 weights, element by element from the definitions: torch's own e4m3, a table of e2m1."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    plain: Weights = {}
    for name, tensor in weights.items():
        if name.endswith(".scale"):
            continue
        scale = weights.get(name.removesuffix(".weight") + ".scale")
        if scale is None:
            plain[name] = tensor
            continue
        if tensor.dtype == torch.int8:
            codes = torch.stack([tensor & 15, (tensor >> 4) & 15], dim=-1).flatten(1).long()
            tensor, block = table[codes & 7] * torch.where(codes > 7, -1.0, 1.0), (1, 32)
        else:
            block = (1, 32) if name.endswith("engram.embed.weight") else fp8_block
        factors = scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        plain[name] = tensor.float() * factors[: tensor.shape[0], : tensor.shape[1]]
    return plain


def test_every_tensor_is_stored_as_published(stored: Weights) -> None:
    kinds = {
        r"embed\.weight|head\.weight|(.*\.)?norm\.weight|.*_norm\.weight|mtp\.0\.[eh]norm\.weight": torch.bfloat16,
        r".*\.compressor\.(wkv|wgate)\.weight|.*\.indexer\.weights_proj\.weight|.*\.ffn\.gate\.weight": torch.bfloat16,
        r"(layers|mtp)\.\d\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)\.weight": torch.float8_e4m3fn,
        r"(layers|mtp)\.\d\.ffn\.shared_experts\.w[123]\.weight": torch.float8_e4m3fn,
        r"(layers|mtp)\.\d\.ffn\.experts\.\d\.w[123]\.weight": torch.int8,
        r"mtp\.0\.(e_proj|h_proj)\.weight": torch.float8_e4m3fn,
        r".*\.scale": torch.float8_e8m0fnu,
        r".*hc_\w+|.*\.ape|.*\.attn_sink|.*\.gate\.bias": torch.float32,
        r".*\.tid2eid": torch.int64,
    }
    for name, tensor in stored.items():
        assert [dtype for pattern, dtype in kinds.items() if re.fullmatch(pattern, name)] == [tensor.dtype], name
    assert stored["layers.0.ffn.experts.0.w2.weight"].shape == (96, 32)
    assert stored["layers.0.ffn.experts.0.w2.scale"].shape == (96, 2)
    assert stored["layers.0.attn.wq_b.scale"].shape == (1, 1)


def test_the_quantized_tiny_model_has_shards_and_the_config_of_a_published_one(quantized_path: Path) -> None:
    config = json.loads((quantized_path / "config.json").read_text())
    assert config["expert_dtype"] == "fp4"
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert len(list(quantized_path.glob("model-*.safetensors"))) > 2


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_it_is_exactly_the_model_that_its_numbers_stand_for(
    quantized_path: Path, stored: Weights, tmp_path: Path, dtype: str
) -> None:
    plain = one_file(quantized_path, tmp_path, dequantized(stored))
    ours, expected = (models.load(path, dtype=dtype) for path in (quantized_path, plain))
    assert ours.embedding.dtype == (torch.bfloat16 if dtype == "auto" else torch.float32)
    assert torch.equal(PagedRun(ours).prompt(TOKENS), PagedRun(expected).prompt(TOKENS))


def test_experts_stay_in_fp4_where_a_kernel_reads_them(
    quantized_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moes = [layer.moe for layer in models.load(quantized_path).layers]
    if not Fp4Stack.fits("cpu", torch.bfloat16, [16], 32):
        assert {type(moe.w13) for moe in moes} == {Weight}
        pytest.skip("this machine has no kernel for FP4")
    parts = [part for moe in moes for part in (moe.w13, moe.w2) if isinstance(part, Fp4Weight)]
    assert len(parts) == 2 * len(moes)
    assert main(["describe", "-o", "json", str(quantized_path)]) == 0
    told = json.loads(capsys.readouterr().out)["weights"]["rank_memory_fp4_bytes"]["experts"]
    assert sum(part.codes.nbytes + part.scales.nbytes for part in parts) == told
    wide = models.load(quantized_path, dtype="float32").layers[0].moe.w13
    assert isinstance(wide, Weight)
    assert torch.equal(parts[0].plain().float(), wide.plain())


def change_scales(weights: Weights) -> None:
    """FP8 experts with fp32 scales, as the base checkpoints have them, and blocks of 32, as V4.1 has them."""
    generator = torch.Generator().manual_seed(1)
    for name in ("layers.1.ffn.experts.3.w1", "layers.1.ffn.experts.3.w2"):
        rows, columns = weights[f"{name}.weight"].shape
        values = torch.randn((rows, 2 * columns), generator=generator).to(torch.float8_e4m3fn)
        weights[f"{name}.weight"], weights[f"{name}.scale"] = values, torch.tensor([[0.0137]])
    weights["layers.2.attn.wq_a.scale"] = (
        torch.arange(120, 126, dtype=torch.uint8).view(torch.float8_e8m0fnu).view(2, 3)
    )


def test_fp32_scales_and_small_blocks_are_found_from_the_tensors(
    quantized_path: Path, stored: Weights, tmp_path: Path
) -> None:
    weights = dict(stored)
    change_scales(weights)
    model = models.load(one_file(quantized_path, tmp_path, weights), dtype="float32")
    expert = weights["layers.1.ffn.experts.3.w2.weight"].float() * 0.0137
    assert torch.equal(model.layers[1].moe.w2.plain()[3], expert)
    latent = weights["layers.2.attn.wq_a.weight"].float()
    factors = 2.0 ** (torch.arange(120, 126).view(2, 3) - 127.0)
    latent *= factors.repeat_interleave(32, 0)[:48].repeat_interleave(32, 1)
    assert torch.equal(model.layers[2].attention.weights.w_in.weight.plain()[:48], latent)


def scales_of_a_plain_tensor(weights: Weights) -> None:
    weights["head.scale"] = torch.ones(1, 1)


def expert_without_scale(weights: Weights) -> None:
    del weights["layers.0.ffn.experts.7.w1.scale"]


def expert_with_wide_scales(weights: Weights) -> None:
    weights["layers.0.ffn.experts.7.w1.scale"] = torch.ones(64, 3)


def scale_of_another_grid(weights: Weights) -> None:
    weights["layers.0.attn.wkv.scale"] = torch.ones(2, 2)


def expert_cut_short(weights: Weights) -> None:
    weights["layers.0.ffn.experts.7.w1.weight"] = weights["layers.0.ffn.experts.7.w1.weight"][:, :32]


def packed_table(weights: Weights) -> None:
    weights["layers.0.ffn.gate.tid2eid"] = weights["layers.0.ffn.gate.tid2eid"].to(torch.int8)


def expert_scale_is_nan(weights: Weights) -> None:
    scale = weights["layers.1.ffn.experts.5.w3.scale"].view(torch.uint8).clone()
    scale[3, 1] = 255
    weights["layers.1.ffn.experts.5.w3.scale"] = scale.view(torch.float8_e8m0fnu)


def scale_is_nan(weights: Weights) -> None:
    scale = weights["layers.0.attn.wkv.scale"].view(torch.uint8).clone().fill_(255)
    weights["layers.0.attn.wkv.scale"] = scale.view(torch.float8_e8m0fnu)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (scales_of_a_plain_tensor, r"1 tensors unexpected: head\.scale"),
        (expert_without_scale, r"be read: layers\.0\.ffn\.experts\.7\.w1\.weight \(I8 without a \.scale\)"),
        (expert_with_wide_scales, r"experts\.7\.w1\.weight \(I8 with scales in F32\)"),
        (scale_of_another_grid, r"layers\.0\.attn\.wkv\.weight \[32, 96\] with scales \[2, 2\]"),
        (expert_cut_short, r"experts\.7\.w1\.weight \[64, 32\] instead of \[64, 48\]"),
        (packed_table, r"tid2eid \(I8 instead of integers\)"),
        (expert_scale_is_nan, r"tensor layers\.1\.ffn\.experts\.5\.w3\.weight: a scale is not a finite number"),
        (scale_is_nan, r"model\.safetensors: tensor layers\.0\.attn\.wkv\.weight: a scale is not a finite number"),
    ],
)
def test_what_does_not_fit_is_named(
    quantized_path: Path, stored: Weights, tmp_path: Path, change: Callable[[Weights], None], message: str
) -> None:
    weights = dict(stored)
    change(weights)
    with pytest.raises(ModelError, match=message):
        models.load(one_file(quantized_path, tmp_path, weights))
