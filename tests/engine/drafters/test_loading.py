"""Drafters of checkpoints: read when asked, by rank, in published number formats; and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.engine.drafters.conftest import FAMILIES, Pair
from tests.engine.drafters.harness import DraftRun
from tests.engine.model.harness import random_tokens
from tests.engine.model.test_quantized import dequantized

from headrace_engine import models
from headrace_engine.cli import main
from headrace_engine.ep.exchange import RunExperts
from headrace_engine.ep.local import LocalExchange
from headrace_engine.models import ModelError
from headrace_engine.models.deepseek_v4.draft import parse_drafter
from headrace_engine.models.deepseek_v4.tiny import TINY_0731_CONFIG, TINY_CONFIG
from headrace_engine.models.dspark.config import DsparkConfig
from headrace_engine.models.dspark.drafter import Dspark
from headrace_engine.models.progress import LoadProgress

Folder = Callable[[str], Path]
TEXT = random_tokens(12, seed=3)


def drafted(model: Any, drafter: Any) -> torch.Tensor:
    run = DraftRun(model, drafter)
    return run.step([(run.sequence(), TEXT, 9)]).logits


def test_a_checkpoint_without_a_drafter(folder_of: Folder, tmp_path: Path) -> None:
    path = Path(shutil.copytree(folder_of("v4"), tmp_path / "copy"))
    (path / "config.json").write_text(json.dumps({**TINY_CONFIG, "num_nextn_predict_layers": 0}))
    with pytest.raises(ModelError, match="has no drafter"):
        models.load_drafter(path, models.load(path))


def test_missing_draft_tensors_are_named(folder_of: Folder, tmp_path: Path) -> None:
    path = Path(shutil.copytree(folder_of("v41"), tmp_path / "copy"))
    weights = load_file(path / "model.safetensors")
    weights["mtp.0.markov_head.embed.weight"] = weights.pop("mtp.2.markov_head.embed.weight")
    save_file(weights, path / "model.safetensors")
    model = models.load(path)  # which needs none of them
    with pytest.raises(ModelError, match=r"missing: mtp\.2\.markov_head\.e.*unexpected: mtp\.0\.markov_head\.e"):
        models.load_drafter(path, model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dspark_block_size": 0}, "dspark_block_size must be a positive integer"),
        ({"dspark_noise_token_id": 9999}, "dspark_noise_token_id must be a token id, got 9999"),
        ({"dspark_target_layer_ids": [3, 6]}, r"dspark_target_layer_ids must list layers below 6, got \[3, 6\]"),
        ({"dspark_target_layer_ids": [5, 3]}, "dspark_target_layer_ids must ascend"),
        ({"dspark_markov_rank": None}, "dspark_markov_rank must be a positive integer"),
    ],
)
def test_what_is_refused_of_dspark(change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_drafter({**TINY_0731_CONFIG, **change})


def test_several_mtp_layers_are_refused() -> None:
    with pytest.raises(ModelError, match="num_nextn_predict_layers = 2 is not supported"):
        parse_drafter({**TINY_CONFIG, "num_nextn_predict_layers": 2})


def test_stages_of_0731_are_three_whatever_num_nextn_predict_layers_says() -> None:
    drafter = parse_drafter({**TINY_0731_CONFIG, "num_nextn_predict_layers": 1})
    assert isinstance(drafter, DsparkConfig)
    assert (drafter.num_stages, drafter.entries) == (3, (4, 5, 6))


def test_a_block_of_another_size_is_refused(folder_of: Folder, loaded: Callable[[str], Pair]) -> None:
    with pytest.raises(ModelError, match="drafts 5 tokens at once, not 4"):
        models.load_drafter(folder_of("v41"), loaded("v41")[0], num_drafts=4)


@pytest.mark.parametrize("family", ["v4", "v4-0731", pytest.param("v41", marks=pytest.mark.slow)])
def test_published_number_formats_give_the_drafter_that_the_numbers_stand_for(
    folder_of: Folder, tmp_path: Path, family: str
) -> None:
    published, plain = tmp_path / "published", Path(shutil.copytree(folder_of(family), tmp_path / "plain"))
    assert main(["tiny", "--family", family, "--quantized", str(published)]) == 0
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(published.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            stored.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118 - not a mapping
    projection = "mtp.0.e_proj.weight" if family == "v4" else "mtp.0.main_proj.weight"
    assert stored[projection].dtype is torch.float8_e4m3fn
    block = (32, 32) if family == "v41" else (128, 128)
    numbers = dequantized(stored, fp8_block=block)
    save_file({name: tensor.contiguous() for name, tensor in numbers.items()}, plain / "model.safetensors")
    found = []
    for path in (published, plain):
        model = models.load(path, dtype="float32", cache_dtype="float32")
        found.append(drafted(model, models.load_drafter(path, model, cache_dtype="float32")))
    assert torch.equal(*found)


def test_a_rank_reads_its_own_experts(folder_of: Folder, loaded: Callable[[str], Pair]) -> None:
    model, whole = loaded("v41")
    reports: list[tuple[int, int]] = []
    progress = LoadProgress(lambda done, total: reports.append((done, total)))
    path = folder_of("v41")
    half = models.load_drafter(path, model, rank=1, num_ranks=2, expert_parallel=True, progress=progress)
    assert isinstance(half, Dspark)
    assert isinstance(whole, Dspark)
    assert torch.equal(half.stages[2].moe.w13.plain(), whole.stages[2].moe.w13.plain()[3:])
    draft = [tensor for name, tensor in load_file(path / "model.safetensors").items() if name.startswith("mtp.")]
    num_bytes = sum(tensor.nbytes for tensor in draft)
    assert reports[-1] == (num_bytes - 3 * 3 * 3 * 96 * 64 * 4, num_bytes - 3 * 3 * 3 * 96 * 64 * 4)


class CountedExchange(LocalExchange):
    num_calls = 0

    def run(
        self, hidden: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, run_experts: RunExperts
    ) -> torch.Tensor:
        self.num_calls += 1
        return super().run(hidden, expert_ids, expert_weights, run_experts)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_idle_rank_joins_as_many_exchanges_as_a_busy_one(loaded: Callable[[str], Pair], family: str) -> None:
    counts = []
    for length in (0, 5):
        run = DraftRun(*loaded(family))
        run.main.exchange = CountedExchange()
        parts = [(run.sequence(), TEXT[:length], 9)][: length and 1]
        assert run.step(parts).token_ids.shape == (len(parts), loaded(family)[1].num_drafts)
        counts.append(run.main.exchange.num_calls)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_in_bf16(folder_of: Folder, family: str) -> None:
    model = models.load(folder_of(family), dtype="bfloat16", cache_dtype="bfloat16")
    drafter = models.load_drafter(folder_of(family), model, cache_dtype="bfloat16")
    assert {group.dtype for group in drafter.cache_groups} == {"bfloat16"}
    assert bool(drafted(model, drafter).isfinite().all())
