"""Every command line in the documents names things that exist: targets, subcommands, flags, files, labels."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import pytest
import yaml
from tests.docs.markdown import ROOT, commands, documents, name

from headrace_engine import cli as engine
from headrace_engine.router import cli as router
from headrace_operator import cli as headrace
from headrace_operator import main as operator
from headrace_operator import names

PROGRAMS = ("headrace", "headrace-engine", "headrace-router", "headrace-operator")
KUBECTL_KINDS = {
    *(names.PLURAL, names.SINGULAR, names.SHORT_NAME, names.SCALER_SHORT_NAME),
    *("pods", "controllerrevisions", "disaggrolescalers", "pod", "nodes", "services", "svc", "events", "leases"),
}


def found(program: str) -> list[pytest.param]:
    """Arguments of every documented command of a program."""
    cases = {
        (name(document), tuple(words[1:]))
        for document in documents()
        for words in commands(document)
        if Path(words[0]).name == program and not words[0].endswith("/") and len(words) > 1
    }
    return [pytest.param(list(words), id=f"{where}: {' '.join(words)}") for where, words in sorted(cases)]


def make_targets() -> set[str]:
    files = [ROOT / "Makefile", *(ROOT / "make").glob("*.mk")]
    return {target for path in files for target in re.findall(r"^([a-z0-9_-]+):", path.read_text(), re.MULTILINE)}


@pytest.mark.parametrize("words", found("make"))
def test_make_targets_exist(words: list[str]) -> None:
    targets = [word for word in words if "=" not in word]
    assert targets
    for target in targets:
        pattern = re.compile(target.replace("*", ".*"))
        assert any(pattern.fullmatch(known) for known in make_targets()), f"no target {target}"


def test_every_make_target_has_a_line_of_help() -> None:
    for path in [ROOT / "Makefile", *(ROOT / "make").glob("*.mk")]:
        text = path.read_text()
        for phony in re.findall(r"^\.PHONY: (.+)$", text, re.MULTILINE):
            for target in phony.split():
                assert re.search(rf"^{target}:.*## \S", text, re.MULTILINE), f"{path.name}: {target} has no help"


# --- our own programs ---


def parse(program: str, words: list[str]) -> None:
    """With the program's real parser; raises SystemExit where it would refuse."""
    if program == "headrace":
        headrace._parser().parse_args(words)
    elif program == "headrace-engine":
        arguments, rest = engine._parser().parse_known_args(words)
        if rest and arguments.run is not engine._bench_transfer:
            raise SystemExit(f"unrecognized arguments: {rest}")
    elif program == "headrace-router":
        router.parser().parse_args(words)
    else:
        operator._parse(words)


OWN = [
    pytest.param(program, case.values[0], id=f"{program}, {case.id}") for program in PROGRAMS for case in found(program)
]


@pytest.mark.parametrize(("program", "words"), OWN)
def test_our_own_programs_take_the_documented_arguments(
    program: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    if "--help" in words:
        with pytest.raises(SystemExit) as ended:
            parse(program, words)
        assert ended.value.code == 0
        return
    # `headrace up` in prose is about the command, not a whole line.
    if program in ("headrace", "headrace-engine") and len(words) <= 2 and not _takes(program, words):
        assert set(words) <= subcommands(program), f"{program} has no {' '.join(words)}"
        return
    parse(program, words)


def _takes(program: str, words: list[str]) -> bool:
    try:
        parse(program, words)
    except SystemExit:
        return False
    return True


def subcommands(program: str) -> set[str]:
    parser = headrace._parser() if program == "headrace" else engine._parser()
    return {command for level in _levels(parser) for command in level.choices}


def _levels(parser: argparse.ArgumentParser) -> list[argparse._SubParsersAction]:
    own = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return own + [level for action in own for child in action.choices.values() for level in _levels(child)]


# --- programs of others ---


@pytest.mark.parametrize("words", found("python3"))
def test_python_files_and_their_arguments_exist(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script, *arguments = words
    assert (ROOT / script).is_file()
    if script == "e2e/cluster/cluster.py":
        monkeypatch.syspath_prepend(str(ROOT / "e2e/cluster"))
        from onemachine.cli import parser

        if arguments and "--help" not in arguments:
            parser().parse_args([word for word in arguments if word != "|"])


@pytest.mark.parametrize("words", found("kubectl"))
def test_kubectl_speaks_of_kinds_and_labels_that_exist(words: list[str]) -> None:
    verb, *rest = words
    assert verb in {"get", "explain", "apply", "delete", "describe", "logs", "port-forward", "wait", "config", "scale"}
    if verb == "get":
        assert set(rest[0].split(",")) <= KUBECTL_KINDS
    if verb == "explain":
        assert rest[0].split(".")[:2] == [names.SHORT_NAME, "spec"]
    for word in words:
        for label in re.findall(r"headrace\.dev/[\w-]+", word):
            assert label in vars(names).values()


@pytest.mark.parametrize("words", found("helm"))
def test_helm_sets_values_that_the_chart_has(words: list[str]) -> None:
    chart = next(ROOT / word for word in words if word.startswith("charts/"))
    values = yaml.safe_load((chart / "values.yaml").read_text())
    for setting in words[words.index("--set") + 1].split(","):
        value = values
        for key in setting.partition("=")[0].split("."):
            assert key in value, setting
            value = value[key]


FILE_ARGUMENTS = re.compile(r"^(?:docs|images|charts|e2e|tests|make|operator|engine|requirements)/[\w./-]+$|^crds/?$")


@pytest.mark.parametrize("document", documents(), ids=name)
def test_files_in_commands_exist(document: Path) -> None:
    for words in commands(document):
        for word in words:
            if FILE_ARGUMENTS.match(word) and len(words) > 1:
                assert (ROOT / word).exists(), " ".join(words)
