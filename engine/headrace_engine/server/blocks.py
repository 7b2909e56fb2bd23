"""An answer as a row of blocks (reasoning, text, calls), one after another, as Anthropic's and OpenAI's newer API
write it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from headrace_engine.server.answers import Choice, call_id
from headrace_engine.server.generation import Delta

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """text: the reasoning, the text, or a call's arguments (JSON). name, call_id: of a call."""

    kind: Kind
    index: int
    text: str = ""
    name: str = ""
    call_id: str = field(default_factory=lambda: call_id())


@dataclass(frozen=True)
class Opened:
    block: Block


@dataclass(frozen=True)
class Added:
    block: Block
    text: str


@dataclass(frozen=True)
class Closed:
    block: Block


Step = Opened | Added | Closed


class BlockStream:
    """Cuts deltas into blocks as they come."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._is_open = False

    def feed(self, delta: Delta) -> list[Step]:
        steps: list[Step] = []
        if delta.reasoning:
            self._add("reasoning", delta.reasoning, steps)
        if delta.text:
            self._add("text", delta.text, steps)
        for piece in delta.calls:
            if piece.name is not None:
                self._open("call", steps, piece.name)
            self._add("call", piece.arguments, steps)
        return steps

    def finish(self) -> list[Step]:
        steps: list[Step] = []
        self._close(steps)
        return steps

    def _add(self, kind: Kind, text: str, steps: list[Step]) -> None:
        if not self._is_open or self.blocks[-1].kind != kind:
            self._open(kind, steps)
        if text:
            self.blocks[-1].text += text
            steps.append(Added(self.blocks[-1], text))

    def _open(self, kind: Kind, steps: list[Step], name: str = "") -> None:
        self._close(steps)
        self.blocks.append(Block(kind, len(self.blocks), name=name))
        self._is_open = True
        steps.append(Opened(self.blocks[-1]))

    def _close(self, steps: list[Step]) -> None:
        if self._is_open:
            self._is_open = False
            steps.append(Closed(self.blocks[-1]))


def blocks_of(choice: Choice) -> list[Block]:
    """A whole answer's blocks."""
    parts: list[tuple[Kind, str, str]] = [("reasoning", choice.reasoning, ""), ("text", choice.text, "")]
    parts = [part for part in parts if part[1]]
    parts += [("call", arguments, name) for name, arguments in choice.calls]
    return [Block(kind, index, text, name) for index, (kind, text, name) in enumerate(parts)]
