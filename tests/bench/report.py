"""What a benchmark run found: samples by cell and server, the table, the JSON file, the machine it ran on."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    name: str
    unit: str
    higher_is_better: bool


@dataclass
class Results:
    """Values of every repetition, by cell and server, in the cell's unit; `requests` holds the raw timings."""

    cells: list[Cell] = field(default_factory=list)
    values: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    servers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, cell: Cell, server: str, value: float) -> None:
        if cell not in self.cells:
            self.cells.append(cell)
        self.values.setdefault((cell.name, server), []).append(value)

    def median(self, cell: Cell, server: str) -> float | None:
        values = self.values.get((cell.name, server))
        return statistics.median(values) if values else None

    def ratio(self, cell: Cell, server: str, reference: str) -> float | None:
        """How many times better `server` is than `reference`, by medians: above 1 is better, whatever the unit."""
        ours, theirs = self.median(cell, server), self.median(cell, reference)
        if not ours or not theirs:
            return None
        return ours / theirs if cell.higher_is_better else theirs / ours


def table(results: Results, servers: Sequence[str], reference: str | None) -> str:
    """A Markdown table: min / median / max of each server, then each other server's ratio to the reference."""
    compared = [server for server in servers if server != reference] if reference else []
    header = ["", "unit", *servers, *(f"{server} vs {reference}" for server in compared)]
    rows = [header]
    for cell in results.cells:
        spans = [_span(results.values.get((cell.name, server))) for server in servers]
        ratios = [results.ratio(cell, server, reference or "") for server in compared]
        rows.append([cell.name, cell.unit, *spans, *("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _span(values: list[float] | None) -> str:
    if not values:
        return "-"
    low, middle, high = min(values), statistics.median(values), max(values)
    digits = 0 if middle >= 100 else 1 if middle >= 10 else 2
    return f"{low:.{digits}f} / {middle:.{digits}f} / {high:.{digits}f}" if len(values) > 1 else f"{middle:.{digits}f}"


def machine() -> dict[str, Any]:
    """What figures depend on: processor, its vector extensions, cores, memory, kernel."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = set(fields.get("flags", "").split())
    return {
        "processor": fields.get("model name", platform.processor()),
        "vector_extensions": sorted(flags & {"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_tile"}),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "load_average": os.getloadavg(),
    }


def versions() -> dict[str, str]:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=30)
    packages = {name: importlib.metadata.version(name) for name in ("headrace", "torch", "nixl", "aiohttp")}
    return {"python": platform.python_version(), "commit": commit.stdout.strip() or "unknown", **packages}


def write_json(path: Path, results: Results, settings: dict[str, Any], reference: str | None) -> None:
    """Everything of the run in one file: summaries for people, raw samples for whoever doubts them."""
    cells = []
    for cell in results.cells:
        measured = {server: values for (name, server), values in results.values.items() if name == cell.name}
        ratios = {s: results.ratio(cell, s, reference) for s in measured if reference and s != reference}
        medians = {server: statistics.median(values) for server, values in measured.items()}
        cells.append({**asdict(cell), "medians": medians, "samples": measured, "ratios": ratios})
    content = {
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "settings": settings,
        "servers": results.servers,
        "reference": reference,
        "cells": cells,
        "requests": results.requests,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, default=str) + "\n")
