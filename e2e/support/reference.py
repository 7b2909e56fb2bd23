"""What the answer must be: greedy tokens of transformers' own DeepSeek-V4, in fp32, on the same tiny checkpoint."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Sequence
from typing import Any


@functools.cache
def _model(seed: int) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM

    from headrace_engine.models.tiny import write_tiny

    folder = tempfile.TemporaryDirectory(prefix="headrace-tiny-")
    write_tiny(folder.name, family="v4", seed=seed)
    model = AutoModelForCausalLM.from_pretrained(folder.name, dtype=torch.float32, attn_implementation="eager").eval()
    folder.cleanup()
    return model


def greedy_tokens(prompt_token_ids: Sequence[int], num_tokens: int, seed: int = 0, eos_token_id: int = 1) -> list[int]:
    """The next `num_tokens` greedy tokens, or fewer up to and including end-of-sequence."""
    import torch
    from transformers import DynamicCache

    model = _model(seed)
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([list(prompt_token_ids)])
    made: list[int] = []
    with torch.no_grad():
        while len(made) < num_tokens:
            logits = model(ids, past_key_values=cache, use_cache=True).logits
            made.append(int(logits[0, -1].argmax()))
            if made[-1] == eos_token_id:
                break
            ids = torch.tensor([made[-1:]])
    return made


def greedy_batch(prompts: Sequence[Sequence[int]], num_tokens: int, seed: int = 0) -> list[list[int]]:
    """The next `num_tokens` greedy tokens of prompts of one length, end-of-sequence ignored: one pass for all."""
    import torch
    from transformers import DynamicCache

    model = _model(seed)
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([list(prompt) for prompt in prompts])
    steps = []
    with torch.no_grad():
        for _ in range(num_tokens):
            logits = model(ids, past_key_values=cache, use_cache=True).logits
            ids = logits[:, -1].argmax(dim=-1, keepdim=True)
            steps.append(ids)
    return torch.cat(steps, dim=1).tolist()
