"""The tiny checkpoint: reproducible, non-trivial everywhere, readable, and accepted by the libraries around it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.engine.model.harness import PagedRun
from tokenizers import Tokenizer

from headrace_engine.models import ModelError
from headrace_engine.models.deepseek_v4.model import DeepseekV4
from headrace_engine.models.tiny import write_tiny


def digests(path: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.iterdir())}


def test_the_same_bytes_in_another_process(tiny_path: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from headrace_engine.models.tiny import write_tiny; write_tiny(sys.argv[1], seed=0);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60, env={"PYTHONHASHSEED": "7"})
    assert digests(tmp_path) == digests(tiny_path)


def test_another_seed_gives_other_weights_and_the_same_tokenizer(tiny_path: Path, tmp_path: Path) -> None:
    write_tiny(tmp_path, seed=1)
    ours, others = digests(tiny_path), digests(tmp_path)
    assert {name for name in ours if ours[name] != others[name]} == {"model.safetensors"}


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tiny model of family 'v9'"):
        write_tiny(tmp_path, family="v9")


def test_no_tensor_is_constant(tiny_path: Path) -> None:
    for name, tensor in load_file(tiny_path / "model.safetensors").items():
        assert tensor.numel() == 1 or float(tensor.float().std()) > 0, name


def test_hash_layers_give_each_token_distinct_experts(tiny_path: Path) -> None:
    table = load_file(tiny_path / "model.safetensors")["layers.0.ffn.gate.tid2eid"]
    assert bool((table[:, 0] != table[:, 1]).all())
    assert len(table.unique(dim=0)) > 20


@pytest.mark.parametrize("text", ["plain", "two\nlines\t", "été 日本 🙂", "<|not special|>", ""])
def test_any_text_survives_the_tokenizer(tiny_path: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_path / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_chat_markers_are_single_tokens(tiny_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_path / "tokenizer.json"))
    text = "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜><think>b</think>c<｜end▁of▁sentence｜>"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) == 9
    assert (ids[0], ids[-1]) == (0, 1)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>b</think>c"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_transformers_reads_the_tokenizer(tiny_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert (
        tokenizer.encode("ab", add_special_tokens=False)
        == Tokenizer.from_file(str(tiny_path / "tokenizer.json")).encode("ab", add_special_tokens=False).ids
    )


def test_generated_text_varies_and_sometimes_ends(model: DeepseekV4, tiny_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_path / "tokenizer.json"))
    run = PagedRun(model, num_blocks=256)
    prompts = [tokenizer.encode(text).ids for text in ("Hello", "What is the capital?", "1 2 3", "x", "été", "a b")]
    sequences = [run.sequence(len(prompt) + 200) for prompt in prompts]
    last = [[int(x[-1].argmax())] for x in run.step(list(zip(sequences, prompts, strict=True)))]
    texts = [list(tokens) for tokens in last]
    for _ in range(180):
        logits = run.step([(s, text[-1:]) for s, text in zip(sequences, texts, strict=True)])
        for text, row in zip(texts, logits, strict=True):
            text.append(int(row[-1].argmax()))
    assert all(len(set(text)) > 20 for text in texts)
    assert len({tuple(text[:8]) for text in texts}) == len(texts)
    ended = [text.index(1) for text in texts if 1 in text]
    assert ended, "no text ends"
    assert all(end >= 8 for end in ended)
    assert torch.tensor(texts).max() < 272
