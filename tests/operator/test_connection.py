"""Which kubeconfig, context and namespace are taken, and what is said of a kubeconfig that is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace_operator import cli
from headrace_operator.cluster import ClusterError
from headrace_operator.connection import connect

TWO = {
    "clusters": [{"name": name, "cluster": {"server": f"http://{name}.example:6443"}} for name in ("one", "two")],
    "users": [{"name": "me", "user": {}}],
    "contexts": [
        {"name": "one", "context": {"cluster": "one", "user": "me", "namespace": "serving"}},
        {"name": "two", "context": {"cluster": "two", "user": "me"}},
    ],
    "current-context": "one",
}


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config"
    path.write_text(json.dumps(TWO))
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    return path


@pytest.mark.parametrize(
    ("context", "server", "namespace"),
    [(None, "http://one.example:6443", "serving"), ("two", "http://two.example:6443", "default")],
)
async def test_the_context_says_where_to_look(
    kubeconfig: Path, context: str | None, server: str, namespace: str
) -> None:
    async with connect(context) as cluster:
        assert (cluster._api.configuration.host, cluster.namespace) == (server, namespace)


async def test_of_several_files_those_are_read_that_exist(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", f"{kubeconfig}-none:{kubeconfig}")
    async with connect() as cluster:
        assert cluster.namespace == "serving"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "does not exist"),
        ("contexts: [", "is no kubeconfig (while parsing"),
        ("just words", "is no kubeconfig"),
        ("", "is no kubeconfig"),
        ("{}", "current-context"),
    ],
    ids=["missing", "no YAML", "no mapping", "empty", "no context"],
)
def test_what_is_no_kubeconfig_is_said_in_a_line_with_what_to_do(
    kubeconfig: Path, text: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kubeconfig.unlink()
    if text is not None:
        kubeconfig.write_text(text)
    with pytest.raises(SystemExit) as end:
        cli.main(["status", "demo"])
    assert end.value.code == 1
    message = capsys.readouterr().err.removesuffix("\n").removeprefix("headrace: ")
    assert said in message
    assert message.startswith("no cluster: ")
    assert message.endswith("; set KUBECONFIG to a kubeconfig file")
    assert "\n" not in message


async def test_a_context_that_is_not_there_is_named(kubeconfig: Path) -> None:
    with pytest.raises(ClusterError, match="the kubeconfig has no context three"):
        async with connect("three"):
            pass
