"""Files over 300 lines and functions over 60: what should be split, or say why not. `make sz` prints them.

A file of tests is a list of cases that nobody reads from top to bottom, so it may have 500 lines.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = {"operator": 300, "engine": 300, "e2e": 300, "tests": 500}  # by folder
SUFFIXES = {".py", ".cpp", ".h", ".go"}


@dataclass(frozen=True, order=True)
class Large:
    """A file, or a function of one as `file:qualified.name`."""

    where: str
    num_lines: int
    limit: int

    def __str__(self) -> str:
        return f"{self.num_lines:5d}  (limit {self.limit:3d})  {self.where}"


def large() -> list[Large]:
    """Everything over its limit, the largest first."""
    found = [
        item
        for folder, limit in MAX_FILE_LINES.items()
        for path in _sources(ROOT / folder)
        for item in _large_in(path, limit)
    ]
    return sorted(found, key=lambda item: item.limit - item.num_lines)


def _sources(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.suffix in SUFFIXES and "__pycache__" not in path.parts)


def _large_in(path: Path, max_lines: int) -> Iterator[Large]:
    text = path.read_text()
    name = str(path.relative_to(ROOT))
    num_lines = text.count("\n")
    if num_lines > max_lines:
        yield Large(name, num_lines, max_lines)
    if path.suffix == ".py":
        for function, num_lines in _functions(ast.parse(text), ""):
            if num_lines > MAX_FUNCTION_LINES:
                yield Large(f"{name}:{function}", num_lines, MAX_FUNCTION_LINES)


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
    """Qualified name and number of lines of every function below `node`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not isinstance(child, ast.ClassDef):
                yield f"{prefix}{child.name}", (child.end_lineno or child.lineno) - child.lineno + 1
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)


if __name__ == "__main__":
    print(*large(), sep="\n")
