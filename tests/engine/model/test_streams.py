"""The streams that drafters read, against transformers' own; and on those, the plain MTP layer against NeMo's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.engine.model.harness import PagedRun, assert_close
from tests.reference.draft_oracle import EXPECTED
from tests.reference.drafters import MtpReference

from headrace_engine.models.deepseek_v4.model import DeepseekV4
from headrace_engine.models.deepseek_v4.tiny import TINY_CONFIG
from headrace_engine.models.drafter import StreamTap


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    stored: list[int] = load_file(EXPECTED)["tokens"].tolist()
    return stored


@pytest.fixture(scope="module")
def streams(reference: torch.nn.Module, tokens: Sequence[int]) -> list[torch.Tensor]:
    """[tokens, N, hidden] leaving each of transformers' layers."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _, inputs, output: found.append(output[0]))
        for layer in reference.model.layers
    ]
    with torch.inference_mode():
        reference(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("is_mean", [False, True])
def test_a_tap_reads_what_enters_a_layer_and_what_leaves_the_last(
    model: DeepseekV4, tokens: Sequence[int], streams: list[torch.Tensor], is_mean: bool
) -> None:
    run, tap = PagedRun(model), StreamTap([2, 5, 6], is_mean=is_mean)
    model.forward(run.batch([(run.sequence(40), tokens)]), run.cache, run.exchange, tap)
    expected = [streams[layer - 1] for layer in (2, 5, 6)]
    parts = [each.mean(dim=1) if is_mean else each.flatten(1) for each in expected]
    assert_close(tap.features(), torch.cat(parts, dim=1), tolerance=2e-4)


def test_mtp_logits_equal_nemo_automodels(tiny_path: Path, tokens: list[int], streams: list[torch.Tensor]) -> None:
    reference = MtpReference(TINY_CONFIG, load_file(tiny_path / "model.safetensors"))
    logits, _ = reference.run(streams[-1][:-1], tokens[1:])
    assert_close(logits.float(), load_file(EXPECTED)["v4.logits"], tolerance=1e-4)
