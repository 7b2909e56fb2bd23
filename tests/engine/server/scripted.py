"""A model that says what a test tells it to, as a function of the whole context like any other model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from tests.engine.serving.toy import EOS, VOCAB, ToyModel

from headrace_engine.chat.prompt import ASSISTANT
from headrace_engine.models.protocol import ForwardBatch
from headrace_engine.server.tokenize import Tokenizer


class ScriptedModel(ToyModel):
    """Its answer to the n-th header (`<｜Assistant｜>`) of a prompt is the n-th script, then end-of-sequence."""

    max_position = 4096

    def __init__(
        self, block_size: int, tokenizer: Tokenizer, scripts: Sequence[str], step_seconds: float = 0.0
    ) -> None:
        super().__init__(block_size, step_seconds)
        header = tokenizer.marker_id(ASSISTANT)
        assert header is not None
        self._header = header
        # encode: in what a model writes, markers are tokens. It adds bos, which this tokenizer has no rule for.
        self._scripts = [[*tokenizer.encode(script), EOS] for script in scripts]

    def forward(self, batch: ForwardBatch, cache: Mapping[str, torch.Tensor], exchange: object) -> torch.Tensor:
        time.sleep(self._step_seconds)
        logits = torch.zeros(len(batch.logit_rows), VOCAB)
        rows = {row: index for index, row in enumerate(batch.logit_rows.tolist())}
        starts = batch.query_starts.tolist()
        for s in range(len(batch.query_lens)):
            end = int(batch.context_lens[s])
            blocks = batch.block_tables[s][: -(-end // self._block_size)].long()
            for i in range(starts[s], starts[s + 1]):
                block, offset = divmod(int(batch.positions[i]), self._block_size)
                cache["tokens"][blocks[block], 0, offset] = batch.token_ids[i]
            if starts[s + 1] - 1 in rows:
                context = [int(t) for t in cache["tokens"][blocks, 0].flatten()[:end].tolist()]
                logits[rows[starts[s + 1] - 1], self._next(context)] = 100.0
        return logits

    def _next(self, context: list[int]) -> int:
        headers = [position for position, token in enumerate(context) if token == self._header]
        num_said = len(context) - headers[-1] - 2  # behind the header and its think marker
        script = self._scripts[len(headers) - 1]
        return script[num_said] if num_said < len(script) else EOS
