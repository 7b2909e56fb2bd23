"""What tokenizing a long session costs: turn 40 of 100K tokens with what turn 39 left behind, against all at once.

The session is an agent's: tools, a system text, then turns of reasoning, a call and its result. Its text is Python's
own library, its vocabulary is learnt from other files of that library. Sizes of turns are drawn like those of recorded
agents: half of them below 700 tokens, some ten times as large. Every prompt's tokens are compared with those of the
whole.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.report import machine
from tests.bench.timing import seconds_of
from tests.engine.chat.conversations import assistant, call, result, system, user
from tests.engine.chat.vocabulary import write_vocabulary

from headrace_engine.chat.formats import ChatFormat, V4Format, V41Format
from headrace_engine.chat.messages import read_functions, read_turns, with_tools
from headrace_engine.server.prompts import PromptEncoder
from headrace_engine.server.tokenize import Tokenizer

FORMATS: dict[str, ChatFormat] = {"v4": V4Format(), "v41": V41Format()}
CHARS_PER_TOKEN = 3.6  # of this text and vocabulary, about; what comes of it is measured
TRAINING_CHARS = 4_000_000
OPENING_TOKENS = 15_000  # tools and system text of an agent
MEDIAN_TURN_TOKENS, LARGEST_TURN_TOKENS, SPREAD = 700, 12_000, 1.4  # of a log-normal distribution
NUM_TOOLS = 30


@dataclass
class Turn:
    """One turn's figures; times are medians over the repetitions."""

    turn: int
    num_tokens: int
    num_chars: int
    num_new_chars: int
    whole_ms: float
    incremental_ms: float
    render_ms: float  # JSON into messages, messages into the prompt's pieces

    @property
    def ratio(self) -> float:
        return self.whole_ms / self.incremental_ms


def library_texts(remainder: int) -> Iterator[str]:
    """Every other file of Python's library, in the order of their names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*/*.py"))
    for index, file in enumerate(files):
        if index % 2 == remainder:
            yield file.read_text(encoding="utf-8", errors="replace")


def take(texts: Iterator[str], num_chars: int) -> str:
    pieces: list[str] = []
    while sum(map(len, pieces)) < num_chars:
        pieces.append(next(texts))
    return "".join(pieces)[:num_chars]


def make_session(
    num_turns: int, num_tokens: int, seed: int, opening_tokens: int = OPENING_TOKENS
) -> tuple[list[Any], list[Any]]:
    """(tools, messages); message 2k + 1 is the k-th turn's question or result."""
    rng = random.Random(seed)
    texts = library_texts(1)
    num_chars = int(opening_tokens / (NUM_TOOLS + 1) * CHARS_PER_TOKEN)
    functions = [{"name": f"tool_{number}", "description": take(texts, num_chars)} for number in range(NUM_TOOLS)]
    tools = [{"type": "function", "function": function} for function in functions]
    messages: list[Any] = [system(take(texts, num_chars)), user("Find out why the build fails.")]
    sizes = [min(LARGEST_TURN_TOKENS, rng.lognormvariate(0, SPREAD) * MEDIAN_TURN_TOKENS) for _ in range(num_turns - 1)]
    scale = (num_tokens - opening_tokens) / sum(sizes)
    for number, size in enumerate(sizes):
        text = take(texts, int(size * scale * CHARS_PER_TOKEN))
        said, found = text[: len(text) // 4], text[len(text) // 4 :]
        calls = [call(f"tool_{number % NUM_TOOLS}", json.dumps({"path": said[-40:]}), f"call_{number}")]
        messages += [assistant(said[:-40], "I look at it.", calls), result(found, f"call_{number}")]
    return tools, messages


def prompt_of(chat_format: ChatFormat, body: str) -> list[str]:
    """The prompt of a request's body: all its strings are new objects, as they are in a server."""
    fields = json.loads(body)
    turns = with_tools(read_turns(fields["messages"]), read_functions(fields["tools"]))
    return chat_format.render(turns, chat_format.options("low", None))


def measure(
    tokenizer: Tokenizer, chat_format: ChatFormat, tools: list[Any], messages: list[Any], turn: int, repetitions: int
) -> Turn:
    """The `turn`-th prompt, after the one before it."""
    before, body = (json.dumps({"tools": tools, "messages": messages[: 2 * n]}) for n in (turn - 1, turn))
    whole, incremental, render = [], [], []
    for _ in range(repetitions):
        encoder = PromptEncoder(tokenizer)
        encoder.encode(prompt_of(chat_format, before))
        pieces = prompt_of(chat_format, body)
        num_new_chars = encoder.num_new_chars(pieces)
        incremental.append(seconds_of(partial(encoder.encode, prompt_of(chat_format, body))))
        whole.append(seconds_of(partial(PromptEncoder(tokenizer).encode, pieces)))
        render.append(seconds_of(partial(prompt_of, chat_format, body)))
    expected = tokenizer.encode("".join(pieces))
    if encoder.encode(pieces) != expected:
        raise SystemExit(f"turn {turn}: its tokens are not those of the whole prompt")
    medians = [statistics.median(values) * 1e3 for values in (whole, incremental, render)]
    return Turn(turn, len(expected), sum(map(len, pieces)), num_new_chars, *medians)


def table(turns: list[Turn]) -> str:
    """Markdown."""
    lines = ["| turn | tokens | characters | of them new | whole, ms | incremental, ms | ratio | read and render, ms |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for turn in turns:
        figures = f"{turn.whole_ms:.1f} | {turn.incremental_ms:.2f} | {turn.ratio:.0f}x | {turn.render_ms:.2f}"
        lines.append(f"| {turn.turn} | {turn.num_tokens} | {turn.num_chars} | {turn.num_new_chars} | {figures} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.tokenize", description=__doc__)
    parser.add_argument("--turn", type=int, default=40, help="the last turn; four before it are measured too")
    parser.add_argument("--tokens", type=int, default=100_000, help="about the length of the prompt at that turn")
    parser.add_argument("--format", choices=sorted(FORMATS), default="v4")
    parser.add_argument("--vocabulary", type=int, default=32_000, help="tokens of the vocabulary that is learnt")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("bench-results/tokenize.json"))
    arguments = parser.parse_args()
    tools, messages = make_session(arguments.turn, arguments.tokens, arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        print("learning a vocabulary", file=sys.stderr, flush=True)
        write_vocabulary(Path(folder), [take(library_texts(0), TRAINING_CHARS)], arguments.vocabulary)
        tokenizer = Tokenizer(Path(folder))
    chat_format = FORMATS[arguments.format]
    turns = [
        measure(tokenizer, chat_format, tools, messages, turn, arguments.repetitions)
        for turn in range(max(2, arguments.turn - 4), arguments.turn + 1)
    ]
    print(table(turns))
    report = {
        "machine": machine(),
        "format": arguments.format,
        "vocabulary": arguments.vocabulary,
        "turns": [asdict(turn) | {"ratio": turn.ratio} for turn in turns],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
