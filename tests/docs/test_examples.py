"""Examples are code: each validates and renders with the commands that users have, the README's block too."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import msgspec
import pytest
import yaml
from tests.docs.markdown import ROOT, blocks, commands, documents, name
from tests.router.fakes import rig

from headrace_engine.server.schema import ChatBody
from headrace_operator import cli, names

EXAMPLES = sorted((ROOT / "docs/examples").glob("*.yaml"))


def resources_in_documents() -> list[pytest.param]:
    return [
        pytest.param(block.text, id=f"{name(document)}, block {number}")
        for document in documents()
        for number, block in enumerate(blocks(document))
        if block.language == "yaml" and f"kind: {names.KIND}" in block.text
    ]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    output = capsys.readouterr()
    assert ended.value.code == 0, output.err
    return output.out


def check(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    resource = yaml.safe_load(path.read_text())
    assert "is valid" in run(capsys, "validate", str(path))
    rendered = json.loads(run(capsys, "render", str(path), "-o", "json"))["items"]
    pods = [body for body in rendered if body["kind"] == "Pod"]
    assert {body["metadata"]["labels"][names.LABEL_ROLE] for body in pods} == {
        role["name"] for role in resource["spec"]["roles"]
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_validate_and_render(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    check(capsys, path)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_says_at_its_top_what_it_is(path: Path) -> None:
    assert path.read_text().startswith("# ")
    assert yaml.safe_load(path.read_text())["metadata"]["name"] == path.stem


@pytest.mark.parametrize("text", resources_in_documents())
def test_resources_in_documents_validate_and_render(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    path = tmp_path / "resource.yaml"
    path.write_text(text)
    check(capsys, path)


def test_requests_in_documents_are_ones_that_an_engine_takes() -> None:
    bodies = [
        json.loads(words[words.index("-d") + 1])
        for document in documents()
        for words in commands(document)
        if words[0] == "curl" and "-d" in words
    ]
    served = {yaml.safe_load(path.read_text())["spec"]["model"]["name"] for path in EXAMPLES}
    assert bodies
    for body in bodies:
        assert body["model"] in served
        assert msgspec.convert(body, ChatBody).messages


@pytest.mark.parametrize(
    "text", [block.text for document in documents() for block in blocks(document) if block.language == "python"]
)
async def test_the_client_in_the_documents_gets_an_answer(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    async with rig() as running:
        (address,) = set(re.findall(r"http://127\.0\.0\.1:\d+", text))
        program = compile(text.replace(address, running.base), "README.md", "exec")
        await asyncio.to_thread(exec, program, {})
    assert capsys.readouterr().out == "abc"


def test_the_readme_shows_a_resource() -> None:
    assert any("README.md" in case.id for case in resources_in_documents() if case.id)


def test_an_example_that_a_command_names_exists() -> None:
    mentioned = {
        word
        for document in documents()
        for words in commands(document)
        for word in words
        if word.startswith("docs/examples/") and word.endswith(".yaml")
    }
    assert {ROOT / word for word in mentioned} <= set(EXAMPLES)
