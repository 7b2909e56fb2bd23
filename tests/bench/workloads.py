"""The cells of the benchmark's table: what is sent, and which figures are taken from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.bench import client
from tests.bench.report import Cell

DECODE_PROMPT_TOKENS = 128
DECODE_OUTPUT_TOKENS = 128
WAVES = 2  # requests of a decode repetition, in multiples of the concurrency
MIN_DECODE_REQUESTS = 3
# A repetition of TTFT sends about this many prompt tokens, one request at a time, and takes the median.
TTFT_TOKENS_PER_REPETITION = 4096

START = Cell("start to first token", "s", higher_is_better=False)
MEMORY = Cell("memory (PSS)", "GiB", higher_is_better=False)
IDLE = Cell("processor use when idle", "% of a core", higher_is_better=False)


@dataclass(frozen=True)
class Workload:
    """One closed-loop load, the same for every server."""

    name: str
    concurrency: int
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    is_decode: bool

    def run(self, url: str, model: str, seed: str) -> client.Sample:
        return client.measure(
            url,
            model,
            concurrency=self.concurrency,
            num_requests=self.num_requests,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            seed=f"{self.name} {seed}",
        )

    def figures(self, sample: client.Sample) -> Iterator[tuple[Cell, float]]:
        """The cells that one repetition fills."""
        if self.is_decode:
            yield Cell(self.name, "tok/s", higher_is_better=True), sample.tokens_per_second
            yield Cell(f"{self.name}, per token", "ms", higher_is_better=False), sample.time_per_token * 1e3
        else:
            yield Cell(self.name, "ms", higher_is_better=False), sample.time_to_first_token * 1e3


def decode(concurrency: int) -> Workload:
    num_requests = max(WAVES * concurrency, MIN_DECODE_REQUESTS)
    return Workload(
        f"decode c={concurrency}", concurrency, num_requests, DECODE_PROMPT_TOKENS, DECODE_OUTPUT_TOKENS, True
    )


def time_to_first_token(prompt_tokens: int) -> Workload:
    size = f"{prompt_tokens // 1024}K" if prompt_tokens % 1024 == 0 else str(prompt_tokens)
    num_requests = max(1, TTFT_TOKENS_PER_REPETITION // prompt_tokens)
    return Workload(f"TTFT {size}", 1, num_requests, prompt_tokens, 2, False)


def warm_up(url: str, model: str, concurrencies: Sequence[int]) -> None:
    """Let a server do once, unmeasured, what it will do: a batch of every size, and a longer prompt."""
    for concurrency in concurrencies:
        client.measure(
            url,
            model,
            concurrency=concurrency,
            num_requests=concurrency,
            prompt_tokens=DECODE_PROMPT_TOKENS,
            output_tokens=16,
            seed=f"warm-up {concurrency}",
        )
    client.measure(
        url, model, concurrency=1, num_requests=1, prompt_tokens=1024, output_tokens=2, seed="warm-up, long prompt"
    )
