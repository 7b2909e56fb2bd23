"""Writes golden/*.json: the prompts of conversations.py as vLLM's own encoders write them.

    python -m tests.engine.chat.regenerate [--wheel FILE]

Without --wheel the pinned wheel (0.2 GB) is downloaded into ${HEADRACE_CACHE:-~/.cache/headrace}.
Two plain modules are taken out of it and run from there; nothing is installed, and no code of theirs is part of this
project.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.engine.chat.conversations import CONVERSATIONS, EFFORTS

VERSION = "0.33.0"
GOLDEN = Path(__file__).with_name("golden")


def fetch_wheel() -> Path:
    cache = Path(os.environ.get("HEADRACE_CACHE") or Path.home() / ".cache" / "headrace") / "vllm-wheel"
    cache.mkdir(parents=True, exist_ok=True)
    if not list(cache.glob(f"vllm-{VERSION}-*.whl")):
        command = ["python3", "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, f"vllm=={VERSION}", "--dest", str(cache)], check=True, timeout=1800)
    (wheel,) = cache.glob(f"vllm-{VERSION}-*.whl")
    return wheel


def load_encoder(wheel: Path, name: str) -> ModuleType:
    with tempfile.TemporaryDirectory() as folder:
        file = zipfile.ZipFile(wheel).extract(f"vllm/tokenizers/deepseek_{name}_encoding.py", folder)
        spec = importlib.util.spec_from_file_location(f"oracle_{name}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def prepare(conversation: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages as vLLM's server hands them to the encoders: text parts joined, tools at the first system text."""
    messages = copy.deepcopy(conversation["messages"])
    for message in messages:
        if isinstance(message["content"], list):
            message["content"] = "\n\n".join(part["text"] for part in message["content"])
        if "reasoning_content" in message:
            message["reasoning"] = message["reasoning_content"]  # V4's encoder reads this one
    if tools := conversation.get("tools"):
        first = next((message for message in messages if message["role"] == "system"), None)
        if first is None:
            first = {"role": "system", "content": ""}
            messages.insert(0, first)
        first["tools"] = tools
    return messages


def prompts_of(encoder: ModuleType, efforts: tuple[str | int, ...]) -> dict[str, str]:
    prompts = {}
    for name, conversation in CONVERSATIONS.items():
        for mode in ("thinking", "chat"):
            prompts[f"{name} | {mode}"] = encoder.encode_messages(
                prepare(conversation),
                thinking_mode=mode,
                drop_thinking=conversation.get("drop_thinking", True),
                reasoning_effort="low" if mode == "thinking" else None,
            )
    for effort in efforts:
        for name in ("one question", "a system text"):
            messages = prepare(CONVERSATIONS[name])
            prompt = encoder.encode_messages(messages, thinking_mode="thinking", reasoning_effort=effort)
            prompts[f"{name} | effort {effort}"] = prompt
    return prompts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help=f"vLLM {VERSION}, if it is on this machine already")
    wheel = parser.parse_args().wheel or fetch_wheel()
    for name, efforts in EFFORTS.items():
        text = json.dumps(prompts_of(load_encoder(wheel, name), efforts), ensure_ascii=False, indent=1)
        (GOLDEN / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        print(GOLDEN / f"{name}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
