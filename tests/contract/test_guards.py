"""What keeps the tree and the programs light: no shadowed module, no heavy imports, help at once, short files."""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.rendered import ROOT
from tests.contract.sizes import large

from headrace_engine import cli as engine
from headrace_engine.router import cli as router
from headrace_operator import cli as headrace

BIN = Path(sys.executable).parent
TENSORS = {"torch", "numpy", "nixl", "triton", "transformers", "safetensors", "tokenizers"}
HELP_CPU_SECONDS = 2.0


@pytest.mark.parametrize("folder", ["operator", "engine"])
def test_plain_folders_are_never_packages(folder: str) -> None:
    # `operator/__init__.py` would shadow Python's own `operator` for whoever runs Python from the root.
    assert not (ROOT / folder / "__init__.py").exists()


def modules(package: str) -> list[str]:
    """All modules of a package, as they are written in imports."""
    (root,) = ROOT.glob(f"*/{package.split('.')[0]}")
    folder = root.joinpath(*package.split(".")[1:])
    return sorted(".".join(path.relative_to(root.parent).with_suffix("").parts) for path in folder.rglob("*.py"))


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("headrace_operator", TENSORS | {"headrace_engine"}),
        ("headrace_engine.router", TENSORS | {"headrace_operator", "kubernetes", "kopf"}),
    ],
)
def test_all_modules_of_a_light_package_load_nothing_heavy(package: str, forbidden: set[str]) -> None:
    code = f"import sys, {', '.join(modules(package))}; print(*{forbidden!r} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_the_engines_http_process_loads_no_torch() -> None:
    # It starts in every pod beside the ranks; torch would cost seconds and hundreds of megabytes there.
    code = "import sys, headrace_engine.pod; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


# --- help ---


def help_of(program: str) -> tuple[str, float]:
    """Output of `PROGRAM --help`, and the CPU seconds that it took."""
    with subprocess.Popen([BIN / program, "--help"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return text, usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("program", ["headrace", "headrace-engine", "headrace-router", "headrace-operator"])
def test_help_comes_at_once(program: str) -> None:
    text, cpu_seconds = help_of(program)
    assert text.startswith(f"usage: {program}")
    if cpu_seconds > HELP_CPU_SECONDS / 2:  # files not yet in memory, a busy machine
        _, cpu_seconds = help_of(program)
    assert cpu_seconds < HELP_CPU_SECONDS


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for parser in (headrace._parser(), engine._parser(), router.parser()):
        yield from _with_children(parser.prog, parser)


def _with_children(path: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield path, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from _with_children(f"{path} {name}", child)


@pytest.mark.parametrize(("path", "parser"), list(parsers()), ids=lambda value: value if isinstance(value, str) else "")
def test_help_describes_every_subcommand_in_one_line(path: str, parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            described = {choice.dest: choice.help for choice in action._choices_actions}
            assert set(described) == set(action.choices)
            for name, text in described.items():
                assert text, f"{path} {name} has no help"
                assert len(text) <= 90, f"{path} {name}"
                assert "\n" not in text


@pytest.mark.parametrize(("path", "parser"), list(parsers()), ids=lambda value: value if isinstance(value, str) else "")
def test_help_describes_every_flag_whose_name_does_not(path: str, parser: argparse.ArgumentParser) -> None:
    speaking = {"--family", "--seed", "name"}  # of `tiny` and `status`
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction) and not speaking & {*action.option_strings, action.dest}:
            assert action.help, f"{path}: {action.option_strings or action.dest}"


# --- sizes ---

# Why each may be so long. An entry that is no longer needed has to go.
ALLOWED_LARGE = {
    "engine/headrace_engine/scheduler.py": "one state machine: each transition is right only beside the others",
}


def test_files_and_functions_are_short_or_say_why_not() -> None:
    found = {item.where: item for item in large()}
    assert [str(item) for where, item in found.items() if where not in ALLOWED_LARGE] == []
    assert set(ALLOWED_LARGE) <= set(found), "shorter now: take it off the list"
    for where in ALLOWED_LARGE:
        assert ast.get_docstring(ast.parse((ROOT / where.split(":")[0]).read_text()))
