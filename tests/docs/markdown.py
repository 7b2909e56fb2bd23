"""The parts of the documents that can be held against the tree: fenced blocks, shell commands, links, quoted paths."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SUBSTITUTION = re.compile(r"\$\(([^()]*)\)")


@dataclass(frozen=True)
class Block:
    language: str
    text: str


def documents() -> list[Path]:
    """Every markdown file that people read."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "e2e").rglob("*.md")]
    return sorted(path for path in found if "node_modules" not in path.parts)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path) -> list[Block]:
    """Fenced blocks."""
    return [Block(language, text) for language, text in _FENCE.findall(path.read_text())]


def prose(path: Path) -> str:
    """The document without fenced blocks."""
    return _FENCE.sub("", path.read_text())


def quoted(path: Path) -> list[str]:
    """What stands between single backquotes outside fenced blocks."""
    return re.findall(r"`([^`\n]+)`", prose(path))


def links(path: Path) -> list[str]:
    """Targets of links and images."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(path))


def headings(path: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def commands(path: Path) -> list[list[str]]:
    """Words of every command in fenced shell blocks and in backquotes, those within $(...) and behind && or | too."""
    shell = [block.text for block in blocks(path) if block.language in ("", "sh", "bash", "console")]
    lines = [line for text in shell for line in text.replace("\\\n", " ").splitlines()]
    return [words for line in [*lines, *quoted(path)] for words in _commands_of(line)]


def _commands_of(line: str) -> list[list[str]]:
    line = line.split("  #")[0].split(" # ")[0].strip().removeprefix("$ ")
    inner = _SUBSTITUTION.findall(line)
    outer = _SUBSTITUTION.sub("SUBSTITUTED", line)
    found = []
    for part in [*inner, *re.split(r"&&|\|\||[|;]", outer)]:
        try:
            words = shlex.split(part)
        except ValueError:
            continue  # not a command: an apostrophe in prose
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words = words[1:]  # variables set for the command
        if words:
            found.append(words)
    return found
