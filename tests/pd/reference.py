"""The independent implementation that every token is compared with: transformers' DeepSeek-V4, in fp32."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from headrace_engine.models.tiny import write_tiny


class Reference:
    """Greedy tokens of the tiny model that `engines` serve, remembered by prompt."""

    def __init__(self, directory: str) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.directory = directory
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._known: dict[tuple[int, ...], list[int]] = {}

    @classmethod
    @contextlib.contextmanager
    def open(cls) -> Iterator[Reference]:
        with tempfile.TemporaryDirectory() as directory:
            write_tiny(Path(directory), "v4", 0)
            yield cls(directory)

    def tokens(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Step by step with transformers' own cache; the end-of-sequence token ends nothing here."""
        known = self._known.get(tuple(prompt), [])
        if len(known) < max_tokens:
            known = self._known[tuple(prompt)] = self._generate(prompt, max_tokens)
        return known[:max_tokens]

    @torch.inference_mode()
    def _generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        tokens: list[int] = []
        output = self._model(torch.tensor([list(prompt)]), use_cache=True)
        while True:
            tokens.append(int(output.logits[0, -1].argmax()))
            if len(tokens) == max_tokens:
                return tokens
            output = self._model(torch.tensor([tokens[-1:]]), cache=output.past_key_values, use_cache=True)
