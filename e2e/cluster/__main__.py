"""`python -m e2e.cluster`: a real Kubernetes on this machine with Octavo's images, and its end."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import TYPE_CHECKING

from e2e.cluster import images
from e2e.cluster.choose import cluster
from e2e.cluster.errors import ClusterError
from e2e.first_token import as_typed, first_token

if TYPE_CHECKING:
    from e2e.cluster.choose import Cluster


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    step = commands.add_parser("up", help="build what is missing, start, and load Octavo's images")
    step.add_argument("--bare", action="store_true", help="without Octavo's images")
    commands.add_parser("ask", help="install the chart and a model in it, and ask as README does")
    commands.add_parser("down", help="end it; nothing stays but the caches")
    commands.add_parser("status", help="exit code 0 where one is up")
    commands.add_parser("check", help="says why this machine cannot hold one: then exit code 1")
    step = commands.add_parser("build", help="only build: the images, and the cluster's program")
    step.add_argument("names", nargs="*", default=list(images.NAMES), metavar="IMAGE")
    commands.add_parser("archives", help="where the built images are, as docker save writes them")
    step = commands.add_parser("load", help="bring images into the running cluster")
    step.add_argument("names", nargs="*", default=list(images.NAMES), metavar="IMAGE")
    step = commands.add_parser("kubectl", help="kubectl with the cluster's credentials")
    step.add_argument("rest", nargs=argparse.REMAINDER)
    step = commands.add_parser("exec", help="a command in the cluster's network, with KUBECONFIG")
    step.add_argument("rest", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    try:
        return _run(args)
    except ClusterError as error:
        print(f"e2e.cluster: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    chosen = cluster()
    match args.command:
        case "check":
            if reason := chosen.why_not():
                raise ClusterError(reason)
        case "build":
            chosen.build(args.names)
        case "archives":
            print(*chosen.archives(images.NAMES), sep="\n")
        case "up":
            names = () if args.bare else images.NAMES
            chosen.build(names)
            chosen.start()
            chosen.load(names)
            print("It is up. Talk to it: python -m e2e.cluster kubectl get pods --all-namespaces")
        case "ask":
            _ask(chosen)
        case "load":
            chosen.load(args.names)
        case "down":
            chosen.stop()
        case "status":
            is_up = chosen.is_up()
            print("up" if is_up else "not up")
            return 0 if is_up else 1
        case "kubectl":
            return subprocess.run(chosen.command(["kubectl", *args.rest]), check=False).returncode
        case "exec":
            rest = args.rest[1:] if args.rest[:1] == ["--"] else args.rest
            return subprocess.run(chosen.command(rest), check=False).returncode
    return 0


def _ask(chosen: Cluster) -> None:
    """Raises ClusterError with what the failed command said."""
    if not chosen.is_up():
        raise ClusterError("no cluster is up: python -m e2e.cluster up")
    commands = first_token()
    print(*commands, sep="\n", flush=True)
    try:
        done = as_typed(chosen, commands)
    except subprocess.TimeoutExpired as error:
        raise ClusterError(
            f"no answer within {error.timeout:.0f} seconds; what the pods wait for: "
            "python -m e2e.cluster kubectl describe pods --all-namespaces"
        ) from None
    if done.returncode:
        raise ClusterError(f"a command failed:\n{done.stdout}{done.stderr}")
    print(json.loads(done.stdout.splitlines()[-1])["choices"][0]["message"]["content"])
    print(
        "It stays up: python -m e2e.cluster kubectl get llmd; its end: python -m e2e.cluster down"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
