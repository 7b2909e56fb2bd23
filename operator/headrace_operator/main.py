"""`headrace-operator`: its flags. What needs a cluster's client is loaded only once they are understood."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from headrace_operator import names

logger = logging.getLogger(__name__)

_EPILOG = """\
examples:
  headrace-operator --engine-image headrace-engine:0.1.0 --router-image headrace-operator:0.1.0
  headrace-operator --namespace serving --metrics-port 0

exit codes: 0 after SIGTERM or SIGINT; 1 no kubeconfig, or another operator took the lease; 2 bad flags, missing image
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run until SIGTERM or SIGINT. Exit codes: see --help."""
    args = _parse(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("kopf").setLevel(logging.WARNING)
    if not args.engine_image or not args.router_image:
        sys.exit(_usage_error("set --engine-image and --router-image, or their environment variables"))
    from headrace_operator.cluster import ClusterError
    from headrace_operator.serve import serve

    try:
        asyncio.run(serve(args))
    except ClusterError as error:
        logger.error("%s", error)
        sys.exit(1)


def _lease(text: str) -> tuple[str, str]:
    namespace, slash, name = text.partition("/")
    if not (namespace and slash and name) or "/" in name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAMESPACE/NAME")
    return namespace, name


def _usage_error(message: str) -> int:
    print(f"headrace-operator: {message}", file=sys.stderr)
    return 2


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="headrace-operator",
        description="Turns DisaggDeployment resources into groups of engine pods.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--namespace",
        action="append",
        dest="namespaces",
        metavar="NAME",
        help="serve this namespace only; may be repeated (default: all namespaces)",
    )
    parser.add_argument(
        "--metrics-port",
        metavar="N",
        type=int,
        default=names.PORT_OPERATOR,
        help="port of /metrics, /healthz and /readyz (default: %(default)s; 0: any free one)",
    )
    parser.add_argument(
        "--lease",
        type=_lease,
        metavar="NAMESPACE/NAME",
        help="work only while holding this Lease, so that others can stand by (default: none; be the only one)",
    )
    parser.add_argument(
        "--engine-image",
        metavar="IMAGE",
        default=os.environ.get(names.ENV_ENGINE_IMAGE),
        help=f"engine image for resources that name none (default: ${names.ENV_ENGINE_IMAGE})",
    )
    parser.add_argument(
        "--router-image",
        metavar="IMAGE",
        default=os.environ.get(names.ENV_ROUTER_IMAGE),
        help=f"router image for resources that name none (default: ${names.ENV_ROUTER_IMAGE})",
    )
    parser.add_argument(
        "--log-level", choices=["debug", "info", "warning"], default="info", help="default: %(default)s"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
