"""Files, links, flags and addresses in the documents: what they name exists, what must not be named is not."""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

import pytest
from tests.docs.markdown import ROOT, documents, headings, links, name, prose, quoted

from headrace_engine import cli as engine
from headrace_engine.router import cli as router

OPERATOR, ENGINE = "operator/headrace_operator", "engine/headrace_engine"
# Folders that paths in a document may be relative to.
BASES = {
    "docs/architecture.md": [OPERATOR, f"{OPERATOR}/render", ENGINE],
    "CONTRIBUTING.md": [OPERATOR, ENGINE, *(f"{ENGINE}/{part}" for part in ("models", "kernels", "kv", "ep", "chat"))],
    "docs/chat.md": [ENGINE],
    "docs/gpu.md": ["engine"],
    "docs/benchmarks.md": [ENGINE],
}
# Not in the tree: made by commands, parts of a checkpoint, or forbidden.
ABSENT = {
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "bench-results/",
    "operator/__init__.py",
    "bin/",
    "cluster/",
    "logs/",
    "registry/",
}
PATH = re.compile(r"^[\w.-]+(?:/[\w.*-]+)*(?:/|\.(?:py|md|yaml|yml|mk|toml|txt|svg|cpp|h|go|json|sh))$")


@pytest.mark.parametrize("document", documents(), ids=name)
def test_quoted_files_and_folders_exist(document: Path) -> None:
    bases = [ROOT, document.parent, *(ROOT / base for base in BASES.get(name(document), []))]
    missing = [
        word
        for word in quoted(document)
        if PATH.match(word) and not any(base.joinpath(word).exists() or list(base.glob(word)) for base in bases)
    ]
    assert set(missing) <= ABSENT


@pytest.mark.parametrize("document", documents(), ids=name)
def test_links_resolve(document: Path) -> None:
    for link in links(document):
        if link.startswith(("http://", "https://")):
            continue  # which hosts may be named is another test
        target, _, anchor = link.partition("#")
        path = (document.parent / target).resolve() if target else document
        assert path.exists(), link
        if anchor:
            assert anchor in headings(path), link


# --- the flags ---


def documented_flags(program: str) -> set[str]:
    text = (ROOT / "docs/architecture.md").read_text().split("## The engine's command line")[1].split("\n## ")[0]
    block = re.split(r"\n    (?=headrace-)", text)
    (own,) = [part for part in block if part.strip().startswith(program)]
    indented = "\n".join(line for line in own.splitlines() if line.startswith(("    ", program)))
    return set(re.findall(r"--[a-z][\w-]*", indented.split("see --help")[0]))


def serve_flags() -> set[str]:
    (commands,) = [a for a in engine._parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return _flags(commands.choices["serve"]._actions)


def _flags(actions: list) -> set[str]:  # type: ignore[type-arg]
    return {option for action in actions for option in action.option_strings if option.startswith("--")} - {"--help"}


def test_the_engines_flags_are_the_documented_ones() -> None:
    assert documented_flags("headrace-engine serve") == serve_flags()


def test_the_routers_flags_are_the_documented_ones_and_its_limits() -> None:
    actions = router.parser()._actions
    limits = set(router.Limits.__dataclass_fields__) | {"max_body_mib", "log_level"}
    optional = {f"--{name.replace('_', '-')}" for name in limits}
    documented = documented_flags("headrace-router")
    assert documented <= _flags(actions)
    assert _flags(actions) - documented <= optional


# --- what must not be there ---


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / path for path in listed.split("\0") if path and (ROOT / path).is_file()]


# Hosts that may be named: documentation and licences, names that nobody owns, private addresses. Nobody's packages
# come from an address that is written here; a host that is missing is added with the document that it serves.
ALLOWED_HOSTS = re.compile(
    r"""^(?:
        json-schema\.org | www\.(?:apache|w3)\.org
      | (?:docs|www)\.(?:python|pytorch)\.org | kubernetes\.io | github\.com | arxiv\.org
      | (?:[\w-]+\.)*(?:example|test|invalid)(?:\.(?:com|org|net))?
      | (?:[\w-]+\.){1,2}svc(?:\.cluster\.local)?                # Services of a cluster
      | [\w-]+                                                   # one label: a Service, a fake in a test
      | (?:127|10|192\.168|172\.\d+)(?:\.\d+)+ | 0\.0\.0\.0
    )$""",
    re.VERBOSE,
)
URL = re.compile(r"https?://(?:[^\s/\"'`<>@]*@)?(\[[\w:]+\]|[A-Za-z0-9][\w.-]*)")
# A person's folder; the container's own /root and the ~ of documentation are nobody's.
HOME_FOLDER = re.compile(r"(?<![\w.])/(?:home|Users)/[A-Za-z0-9_.-]+/")
SCRATCH_FOLDER = re.compile(r"(?<![\w.$}/-])/(?:work|workspace|tmp/[\w-]*scratch)/[A-Za-z0-9_.-]+")
BINARY = {".png", ".safetensors", ".gz", ".so"}


def texts() -> list[tuple[str, str]]:
    found = []
    for path in tracked_files():
        if path.suffix not in BINARY and path != Path(__file__):
            found.append((name(path), path.read_text(errors="replace")))
    return found


def test_what_clients_see_is_shown_by_scenarios_that_exist() -> None:
    document = (ROOT / "docs/operations.md").read_text()
    rows = [line.split("|")[1:-1] for line in document.split("\n## ")[1].splitlines() if line.startswith("|")]
    files = ("e2e/test_traffic.py", "e2e/test_traffic_nodes.py")
    tests = [test for file in files for test in re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.M)]
    named = [row[-1].strip(" `") for row in rows[2:]]
    assert len(named) >= 6
    assert [part for part in named if not any(part in test for test in tests)] == []
    assert [test for test in tests if not any(part in test for part in named)] == []


def test_urls_lead_to_documentation_to_oneself_or_nowhere() -> None:
    strange = {
        (where, host)
        for where, text in texts()
        for host in URL.findall(text)
        if not host.startswith("[") and not ALLOWED_HOSTS.match(host.rstrip("."))
    }
    assert strange == set()


def test_no_file_names_a_folder_of_somebodys_machine() -> None:
    found = {
        (where, match)
        for where, text in texts()
        for pattern in (HOME_FOLDER, SCRATCH_FOLDER)
        for match in pattern.findall(text)
    }
    assert found == set()


def test_requirements_name_no_index() -> None:
    for path in (ROOT / "requirements").glob("*.txt"):
        assert not re.search(r"^\s*(--(extra-)?index-url|-i|--find-links)", path.read_text(), re.MULTILINE), path.name


def test_the_search_for_urls_and_folders_finds_them() -> None:
    """The tests above would pass for ever if their patterns found nothing."""
    scheme = "https:" + "//"
    assert [ALLOWED_HOSTS.match(host) for host in URL.findall(f"{scheme}mirror.corp.internal.io/simple")] == [None]
    assert URL.findall(f"{scheme}user:secret@packages.corp.io/") == ["packages.corp.io"]
    assert HOME_FOLDER.findall("open /home/" + "someone/notes.txt")
    assert SCRATCH_FOLDER.findall("see /" + "workspace/project/file")


def test_documents_are_prose_with_no_unfinished_notes() -> None:
    for document in documents():
        assert not re.search(r"\b(?:TODO|FIXME|XXX|TBD)\b", prose(document)), name(document)
