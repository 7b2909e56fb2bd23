"""`headrace-engine`: the commands of an engine. Each imports what it needs when it runs."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import tempfile
from pathlib import Path

import msgspec

from headrace_engine import describe
from headrace_engine.config import (
    TINY_FOLDER_FAMILIES,
    ConfigError,
    EngineConfig,
    add_serve_arguments,
    config_from,
    parse_tiny,
)

EXIT_BAD_INPUT = 2

_SERVE_HELP = """\
Runs one pod of an engine. Pod 0 of a group is its leader and serves HTTP:
  /v1/models /v1/completions /v1/chat/completions /health /ready /metrics /state, POST /drain

examples:
  headrace-engine serve --tiny v4:0                                one rank, both phases, on port 8000
  headrace-engine serve --model DIR --data 2 --expert-parallel     two ranks here, experts sharded (DEP2)
  headrace-engine serve --model DIR --role decode --port 8001      the decode side of a P/D pair
  headrace-engine serve --model DIR --data 2 --data-local 1 --pod-index 1 --leader-host HOST --expert-parallel
                                                                   the second pod of a DEP2 group

SIGTERM drains: requests in flight are finished (up to --drain-seconds), new ones get 503.
exit codes: 0 after a drain, 2 for a bad flag or checkpoint, 1 for anything else"""


def main(argv: list[str] | None = None) -> int:
    arguments, rest = _parser().parse_known_args(argv)
    if arguments.run is _bench_transfer:
        arguments.rest = rest  # its own parser says what it takes
    elif rest:
        _parser().error(f"unrecognized arguments: {' '.join(rest)}")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    result: int = arguments.run(arguments)
    return result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace-engine", description="Serve a mixture-of-experts model: whole, or prefill and decode apart."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    raw = argparse.RawDescriptionHelpFormatter
    # No abbreviations: an operator that reserves some flags knows their whole names only.
    serve = commands.add_parser(
        "serve", help="run one pod of an engine", formatter_class=raw, epilog=_SERVE_HELP, allow_abbrev=False
    )
    add_serve_arguments(serve)
    serve.set_defaults(run=_serve)
    tiny = commands.add_parser("tiny", help="write a small random checkpoint, the same bytes each time")
    tiny.add_argument("--family", default="v4", choices=TINY_FOLDER_FAMILIES)
    tiny.add_argument("--seed", type=int, default=0, metavar="N")
    tiny.add_argument(
        "--quantized", action="store_true", help="FP8, FP4 and bfloat16 in shards, as published checkpoints are stored"
    )
    tiny.add_argument("directory", metavar="DIR", help="made if absent")
    tiny.set_defaults(run=_tiny)
    describe_parser = commands.add_parser("describe", help="layers, cache and weights of a checkpoint, in bytes")
    describe.add_arguments(describe_parser)
    describe_parser.set_defaults(run=_describe)
    kernels = commands.add_parser("kernels", help="compile the CPU kernels ahead of time")
    build = kernels.add_subparsers(required=True, metavar="COMMAND").add_parser("build", help="compile them")
    build.add_argument("--output", metavar="DIR", help="default: the package's own folder, where engines look first")
    build.add_argument(
        "--target", action="append", default=[], metavar="NAME", help="repeatable; default: this CPU's best; or all"
    )
    build.set_defaults(run=_build_kernels)
    bench = commands.add_parser("bench", help="measure parts of the engine")
    transfer = bench.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "transfer", help="KV push beside a bare write of the same blocks", add_help=False
    )
    transfer.set_defaults(run=_bench_transfer)
    return parser


def _describe(arguments: argparse.Namespace) -> int:
    from headrace_engine.models import ModelError

    try:
        print(describe.run(arguments))
    except ModelError as error:
        return _refuse("describe", error)
    return 0


def _build_kernels(arguments: argparse.Namespace) -> int:
    from headrace_engine.kernels.build import BuildError, build_into

    try:
        for path in build_into(Path(arguments.output) if arguments.output else None, arguments.target):
            print(path)
    except BuildError as error:
        return _refuse("kernels build", error)
    return 0


def _bench_transfer(arguments: argparse.Namespace) -> int:
    from headrace_engine.bench import transfer

    return transfer.main(arguments.rest)


def _serve(arguments: argparse.Namespace) -> int:
    # Until the pod takes over: the first process of a container does not even die of a signal that has no handler.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    try:
        config = config_from(arguments)
    except ConfigError as error:
        return _refuse("serve", error)
    if not config.tiny:
        return _run_pod(config)
    with tempfile.TemporaryDirectory(prefix="headrace-tiny-") as directory:
        family, seed = parse_tiny(config.tiny)
        _write_tiny(Path(directory), family, seed)
        return _run_pod(msgspec.structs.replace(config, model=directory))


def _leave(*_: object) -> None:
    """Told to end before anything has started: there is nothing to drain."""
    raise SystemExit(0)


def _run_pod(config: EngineConfig) -> int:
    import uvloop

    from headrace_engine.models import ModelError
    from headrace_engine.pod import Pod
    from headrace_engine.server.tokenize import TokenizerError

    async def run() -> int:
        return await Pod(config).run()

    try:
        return uvloop.run(run())
    except (ModelError, TokenizerError, ConfigError) as error:
        return _refuse("serve", error)


def _tiny(arguments: argparse.Namespace) -> int:
    if arguments.seed < 0:
        return _refuse("tiny", ConfigError("--seed must not be negative"))
    directory = Path(arguments.directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _write_tiny(directory, arguments.family, arguments.seed, quantized=arguments.quantized)
    except OSError as error:
        return _refuse("tiny", error)
    print(directory)
    return 0


def _write_tiny(directory: Path, family: str, seed: int, *, quantized: bool = False) -> None:
    from headrace_engine.models.tiny import write_tiny

    write_tiny(directory, family, seed, quantized=quantized)


def _refuse(command: str, error: Exception) -> int:
    print(f"headrace-engine {command}: {error}", file=sys.stderr)
    return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
