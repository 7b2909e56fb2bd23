"""Checkpoints: the two name forms, shards, what is wrong with a bad one, and which bytes a rank reads."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.model.harness import PagedRun, random_tokens

from headrace_engine import models
from headrace_engine.models import ModelError
from headrace_engine.models.checkpoint import Checkpoint
from headrace_engine.models.deepseek_v4.model import DeepseekV4
from headrace_engine.models.headers import read_headers, shard_files
from headrace_engine.models.progress import LoadProgress

TOKENS = random_tokens(40, seed=9)


@pytest.fixture
def copy(tiny_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_path, tmp_path / "copy"))


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def set_config(path: Path, **values: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **values}))


def test_what_save_pretrained_writes_loads_the_same(model: DeepseekV4, reference: Any, tmp_path: Path) -> None:
    reference.save_pretrained(tmp_path)
    saved = models.load(tmp_path)
    assert saved.config == model.config
    assert torch.equal(PagedRun(saved).prompt(TOKENS), PagedRun(model).prompt(TOKENS))


def test_shards_with_an_index_load_the_same(model: DeepseekV4, reference: Any, tmp_path: Path) -> None:
    reference.save_pretrained(tmp_path, max_shard_size="1MB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert torch.equal(PagedRun(models.load(tmp_path)).prompt(TOKENS), PagedRun(model).prompt(TOKENS))


def test_a_missing_shard_is_named(reference: Any, tmp_path: Path) -> None:
    reference.save_pretrained(tmp_path, max_shard_size="1MB")
    gone = next(tmp_path.glob("model-00002*"))
    gone.unlink()
    with pytest.raises(ModelError, match=gone.name):
        models.load(tmp_path)


def test_draft_tensors_are_left_out(copy: Path) -> None:
    rewrite(copy, lambda weights: weights.update({"mtp.0.enorm.weight": torch.ones(96)}))
    models.load(copy)


def test_missing_tensors_are_named(copy: Path) -> None:
    rewrite(copy, lambda weights: [weights.pop("norm.weight"), weights.pop("layers.2.attn.indexer.wq_b.weight")])
    with pytest.raises(ModelError, match=r"2 tensors missing: norm\.weight, layers\.2\.attn\.indexer\.wq_b\.weight"):
        models.load(copy)


def test_unexpected_tensors_are_named(copy: Path) -> None:
    rewrite(copy, lambda weights: weights.update({"layers.0.attn.bias": torch.ones(3)}))
    with pytest.raises(ModelError, match=r"1 tensors unexpected: layers\.0\.attn\.bias"):
        models.load(copy)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(copy: Path) -> None:
    set_config(copy, q_lora_rank=40)
    with pytest.raises(ModelError, match=r"layers\.0\.attn\.q_norm\.weight \[48\] instead of \[40\]"):
        models.load(copy)


def test_a_cut_file_is_named_with_the_tensor_that_it_cuts(copy: Path) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:200_000])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or incomplete: tensor [\w.]+ ends at byte"):
        models.load(copy)


def test_a_hash_table_that_names_no_expert_is_refused(copy: Path) -> None:
    rewrite(copy, lambda weights: weights["layers.0.ffn.gate.tid2eid"].fill_(8))
    with pytest.raises(ModelError, match=r"layers\.0\.ffn\.gate\.tid2eid names experts outside 0\.\.7"):
        models.load(copy)


def test_a_folder_without_weights_says_so(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        models.load(copy)


def test_a_rank_reads_and_holds_only_its_own_experts(
    model: DeepseekV4, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: (read.append(name), original(self, name))[1])
    share = models.load(tiny_path, rank=1, num_ranks=2, expert_parallel=True)
    experts = {int(name.split(".experts.")[1].split(".")[0]) for name in read if ".experts." in name}
    assert experts == {4, 5, 6, 7}
    for ours, whole in zip(share.layers, model.layers, strict=True):
        assert torch.equal(ours.moe.w13.plain(), whole.moe.w13.plain()[4:])
        assert torch.equal(ours.moe.w2.plain(), whole.moe.w2.plain()[4:])


def test_an_expert_is_read_whole_after_the_one_before_it_in_the_files(
    model: DeepseekV4, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = load_file(copy / "model.safetensors")
    is_first = {name: any(f".experts.{expert}." in name for expert in range(4, 8)) for name in weights}
    files = {True: "model-1.safetensors", False: "model-2.safetensors"}
    for which, file in files.items():
        save_file({name: weight for name, weight in weights.items() if is_first[name] is which}, copy / file)
    index = {"weight_map": {name: files[which] for name, which in is_first.items()}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    read: list[str] = []
    original = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: (read.append(name), original(self, name))[1])
    loaded = models.load(copy)
    prefix = "layers.1.ffn.experts."
    order = [name.removeprefix(prefix).removesuffix(".weight") for name in read if name.startswith(prefix)]
    assert order == [f"{expert}.{name}" for expert in (4, 5, 6, 7, 0, 1, 2, 3) for name in ("w1", "w3", "w2")]
    for actual, expected in zip(loaded.layers, model.layers, strict=True):
        assert torch.equal(actual.moe.w13.plain(), expected.moe.w13.plain())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_half_of_the_experts_bytes_and_all_that_every_rank_needs(tiny_path: Path, rank: int) -> None:
    stored = [t for t in read_headers(shard_files(tiny_path)).values() if not t.name.startswith("mtp.")]
    expert_bytes = sum(tensor.num_bytes for tensor in stored if ".experts." in tensor.name)
    total = sum(tensor.num_bytes for tensor in stored) - expert_bytes // 2
    reports: list[tuple[int, int]] = []
    progress = LoadProgress(lambda done, total: reports.append((done, total)))
    models.load(tiny_path, rank=rank, num_ranks=2, expert_parallel=True, progress=progress)
    assert (reports[0], reports[-1]) == ((0, total), (total, total))


def test_the_first_layer_that_cannot_be_built_says_why_and_ends_the_load(copy: Path) -> None:
    rewrite(copy, lambda weights: weights["layers.1.ffn.gate.tid2eid"].fill_(-1))
    with pytest.raises(ModelError, match=r"layers\.1\.ffn\.gate\.tid2eid names experts outside"):
        models.load(copy)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("load")]


def test_without_expert_parallel_every_rank_holds_all(tiny_path: Path) -> None:
    assert models.load(tiny_path, rank=1, num_ranks=2).layers[0].moe.w13.shape[0] == 8


def test_experts_that_do_not_split_are_refused(tiny_path: Path) -> None:
    with pytest.raises(ModelError, match="8 experts do not split over 3 ranks"):
        models.load(tiny_path, rank=0, num_ranks=3, expert_parallel=True)


def test_bfloat16_on_request_and_close_to_float32(model: DeepseekV4, tiny_path: Path) -> None:
    """bf16 rounds routing and index choices over in a random model, so only the first tokens can be compared."""
    rounded = models.load(tiny_path, dtype="bfloat16")
    assert rounded.embedding.dtype == torch.bfloat16
    assert {group.dtype for group in rounded.cache_groups} == {"bfloat16", "float32"}  # carries stay wide
    logits, exact = (PagedRun(m).prompt(TOKENS) for m in (rounded, model))
    assert logits.dtype == torch.float32
    assert bool(logits.isfinite().all())
    assert float((logits[0] - exact[0]).std() / exact[0].std()) < 0.3


@pytest.mark.parametrize(
    ("cache_dtype", "is_slow"), [("auto", False), ("bfloat16", False), ("fp8", False), ("float32", True)]
)
def test_a_cache_that_the_compiled_kernels_cannot_read_is_warned_of(
    tiny_path: Path, caplog: pytest.LogCaptureFixture, cache_dtype: str, is_slow: bool
) -> None:
    models.load(tiny_path, dtype="bfloat16", cache_dtype=cache_dtype)
    assert ("a float32 cache under a bfloat16 model" in caplog.text) is is_slow


def test_the_digest_tells_weights_and_precision_apart(tiny_path: Path, copy: Path, model: DeepseekV4) -> None:
    assert models.load(copy).digest == model.digest
    assert models.load(copy, dtype="bfloat16").digest != model.digest
    rewrite(copy, lambda weights: weights["norm.weight"].mul_(1.01))
    assert models.load(copy).digest != model.digest
