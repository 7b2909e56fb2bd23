"""DeepSeek-V4 with the roundings of its training, against transformers' model into which they are put by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.model.harness import PagedRun, assert_mostly_close, random_tokens, reference_logits
from tests.reference.rounding import fp8, hadamard, mxfp4
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

from headrace_engine import models
from headrace_engine.models.deepseek_v4.config import parse
from headrace_engine.models.deepseek_v4.formats import rounding
from headrace_engine.models.deepseek_v4.model import DeepseekV4
from headrace_engine.models.deepseek_v4.tiny import TINY_CONFIG
from headrace_engine.models.errors import ModelError
from headrace_engine.models.rounding import FakeQuantization, turned

TEXTS = [random_tokens(20, seed) for seed in range(3)]  # the indexer leaves entries out from 20 tokens on
ROUNDED_INPUTS = ("q_a_proj", "kv_proj", "q_b_proj", "o_b_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def unrounded(reference: torch.nn.Module) -> torch.Tensor:
    return all_logits(lambda text: reference_logits(reference, text))


@pytest.fixture
def own_reference(tiny_path: Path) -> torch.nn.Module:
    """A copy that a test may change."""
    return AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32).eval()


@pytest.fixture
def _rounds_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    attend, score = theirs.eager_attention_forward, theirs.DeepseekV4IndexerScorer.forward

    def rounded_attend(module: Any, q: torch.Tensor, keys: torch.Tensor, _: Any, *rest: Any, **more: Any) -> Any:
        rotary = module.config.qk_rope_head_dim
        keys = torch.cat([fp8(keys[..., :-rotary], 64), keys[..., -rotary:].bfloat16().float()], dim=-1)
        return attend(module, q, keys, keys, *rest, **more)

    def rounded_score(self: Any, q: torch.Tensor, keys: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return score(self, mxfp4(hadamard(q)), mxfp4(hadamard(keys)), x)

    monkeypatch.setattr(theirs, "eager_attention_forward", rounded_attend)
    monkeypatch.setattr(theirs.DeepseekV4IndexerScorer, "forward", rounded_score)


IN_BFLOAT16 = ("compressor.kv_proj", "compressor.gate_proj", "indexer.kv_proj", "indexer.gate_proj")


def round_inputs(model: torch.nn.Module) -> None:
    """Before every product that has FP8 or FP4 weights in published checkpoints, but the grouped one of the output."""

    def experts(self: Any, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        hidden = self._apply_gate(torch.einsum("td,tkid->tki", fp8(x, 128), self.gate_up_proj[ids]))
        return torch.einsum("tki,tkdi->td", fp8(shares.unsqueeze(-1) * hidden, 128), self.down_proj[ids])

    for name, module in model.named_modules():
        if isinstance(module, theirs.DeepseekV4Experts):
            module.forward = experts.__get__(module)
        elif name.endswith(ROUNDED_INPUTS) and not name.endswith(IN_BFLOAT16):
            module.register_forward_pre_hook(lambda _, arguments: (fp8(arguments[0], 128),))


def all_logits(run: Callable[[list[int]], torch.Tensor]) -> torch.Tensor:
    return torch.cat([run(text) for text in TEXTS])


@pytest.mark.usefixtures("_rounds_the_cache")
def test_a_rounded_cache(tiny_path: Path, own_reference: torch.nn.Module, unrounded: torch.Tensor) -> None:
    expected = all_logits(lambda text: reference_logits(own_reference, text))
    assert float((expected - unrounded).abs().amax(-1).median()) > 0.05, "the roundings must matter"
    run = PagedRun(models.load(tiny_path, fake_quantization="cache"))
    assert_mostly_close(all_logits(run.prompt), expected, share=0.5)
    assert_mostly_close(all_logits(lambda text: run.prompt(text, [7, 1])), expected, share=0.5)


@pytest.mark.usefixtures("_rounds_the_cache")
def test_rounded_inputs_too(tiny_path: Path, own_reference: torch.nn.Module) -> None:
    only_cache = all_logits(lambda text: reference_logits(own_reference, text))
    round_inputs(own_reference)
    expected = all_logits(lambda text: reference_logits(own_reference, text))
    assert float((expected - only_cache).abs().amax(-1).median()) > 0.05, "the roundings must matter"
    run = PagedRun(models.load(tiny_path, fake_quantization="all"))
    assert_mostly_close(all_logits(lambda text: run.prompt(text, [13])), expected, share=0.5)


def test_off_is_what_it_was_without_the_option(model: DeepseekV4, tiny_path: Path) -> None:
    off = models.load(tiny_path, fake_quantization="none")
    assert torch.equal(all_logits(PagedRun(off).prompt), all_logits(PagedRun(model).prompt))


def test_what_is_rounded_is_part_of_the_models_identity(tiny_path: Path) -> None:
    digests = {models.load(tiny_path, fake_quantization=each).digest for each in ("none", "cache", "all")}
    assert len(digests) == 3


@pytest.mark.parametrize("n", [1, 2, 16, 128])
def test_the_hadamard_transform_keeps_products_and_undoes_itself(n: int) -> None:
    x, y = torch.randn((2, 3, n), generator=torch.Generator().manual_seed(n))
    assert torch.allclose(turned(x), hadamard(x), atol=1e-5)
    assert torch.allclose((turned(x) * turned(y)).sum(-1), (x * y).sum(-1), atol=1e-4)
    assert torch.allclose(turned(turned(x)), x, atol=1e-5)


def test_an_index_width_without_a_hadamard_transform_is_refused() -> None:
    config = parse({**TINY_CONFIG, "index_head_dim": 24})
    with pytest.raises(ModelError, match="power of two, not 24"):
        rounding(config, FakeQuantization.CACHE, "float32")
    assert rounding(config, FakeQuantization.NONE, "float32").cache is None
