"""`octavo bundle`: what a site without the internet needs, as one file, and how it gets there."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.options.parser import CommandParser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.bundle.contents import Item
    from octavo.bundle.load import LoadedBundle

_EPILOG = """commands:
  create   pack images, chart, SBOMs and models into one file
  show     check each digest of a bundle, and list what it has
  load     check it, and bring it into a registry, containerd, or a cluster of kind

Run octavo bundle COMMAND --help for details.
"""
PLATFORMS = ("linux/amd64", "linux/arm64")
_SOCKET = "/run/containerd/containerd.sock"


def main(prog: str, argv: Sequence[str]) -> int:
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]](f"{prog} {argv[0]}", argv[1:])
    parser = CommandParser(prog, "One file with all that a site without the internet needs.")
    parser.epilog = _EPILOG
    parser.add_argument("command", choices=sorted(COMMANDS), metavar="COMMAND", help="see below")
    parser.parse_args(argv)
    return 2


def _create(prog: str, argv: Sequence[str]) -> int:
    parser = CommandParser(prog, "Pack images, chart, SBOMs and models into one file.")
    parser.add_argument("--release", type=Path, metavar="DIR",
                        help="images, chart and SBOMs that make release made")  # fmt: skip
    parser.add_argument("--image", type=Path, action="append", default=[], metavar="FILE",
                        help="another image: an OCI layout, or what docker save wrote")  # fmt: skip
    parser.add_argument("--chart", type=Path, metavar="FILE", help="the chart, packed")
    parser.add_argument("--sbom", type=Path, action="append", default=[], metavar="FILE",
                        help="CycloneDX JSON of one of the images")  # fmt: skip
    parser.add_argument("--model", action="append", default=[], metavar="MODEL",
                        help="a name of octavo list --all, a URI, or NAME=PATH")  # fmt: skip
    parser.add_argument("--platform", choices=PLATFORMS, action="append",
                        help="of a release, only the images for this; default: all")  # fmt: skip
    parser.add_argument("--to", type=Path, metavar="FILE", help="default: octavo-VERSION.bundle")
    args = parser.parse_args(argv)
    images, charts, sboms = _of_release(
        args.release, args.image, args.chart, args.sbom, args.platform or PLATFORMS
    )
    if not images or len(charts) != 1:
        parser.error(
            f"a bundle needs images and one chart, but {len(images)} images and {len(charts)} "
            "charts were found; name them with --image and --chart, or a folder with --release"
        )
    from octavo.bundle import contents
    from octavo.bundle.blobs import REFERENCE
    from octavo.bundle.layout import OciLayout

    version = contents.chart_metadata(charts[0])["version"]
    to = args.to or Path(f"octavo-{version}.bundle")
    models = [_model(text) for text in args.model]
    with tempfile.TemporaryDirectory(dir=to.absolute().parent, prefix=".bundle-") as scratch:
        layout = OciLayout(Path(scratch))
        added = [contents.add_image(layout, image, version) for image in images]
        merged = list(layout.merge_platforms())
        contents.add_chart(layout, charts[0])
        contents.add_values(layout, merged, version)
        for bill in sboms:
            contents.add_sbom(layout, bill, version, added)
        for name, path in models:
            contents.add_model(layout, name, path, version)
        names = [each.annotations[REFERENCE] for each in layout.manifests]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            parser.error(f"{twice[0]} is there twice; name each image and model once")
        digest = contents.write(layout, to)
    _, items = contents.read(to, digest)
    _print_items(items)
    print(f"\n{to} ({to.stat().st_size / 1e6:,.0f} MB) is the bundle {digest}")
    return 0


def _show(prog: str, argv: Sequence[str]) -> int:
    parser = CommandParser(prog, "Check each digest of a bundle, and list what it has.")
    _add_bundle(parser)
    args = parser.parse_args(argv)
    from octavo.bundle.contents import read

    reader, items = read(args.bundle, args.digest or "")
    _print_items(items)
    print(f"\n{args.bundle} is whole: the bundle {reader.index.digest()}")
    return 0


def _load(prog: str, argv: Sequence[str]) -> int:
    parser = CommandParser(prog, "Bring a bundle into a registry or into nodes.")
    _add_bundle(parser)
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--registry", metavar="HOST", help="push everything to HOST:PORT[/PATH]")
    place.add_argument("--containerd", nargs="?", const=_SOCKET, metavar="SOCKET",
                       help=f"import the images on this node; default: {_SOCKET}")  # fmt: skip
    place.add_argument("--kind", nargs="?", const="kind", metavar="NAME",
                       help="import the images on all nodes of a cluster of kind")  # fmt: skip
    parser.add_argument("--to", type=Path, metavar="DIR",
                        help="where chart, values, SBOMs and, without a registry, models are "
                        "written; default: octavo-VERSION")  # fmt: skip
    args = parser.parse_args(argv)
    from octavo.bundle import load
    from octavo.bundle.contents import of_kind, read

    print(f"Checking each digest of {args.bundle}", file=sys.stderr, flush=True)
    reader, items = read(args.bundle, args.digest or "")
    to = args.to or Path(f"octavo-{of_kind(items, 'chart')[0].tag}")

    def on_item(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if args.registry is not None:
        loaded = load.into_registry(reader, items, _registry(args.registry), to, on_item)
    else:
        nodes = (
            load.kind_nodes(args.kind)
            if args.kind is not None
            else load.containerd_here(args.containerd)
        )
        loaded = load.into_containerd(reader, items, nodes, to, on_item)
    _print_next(loaded, has_registry=args.registry is not None)
    return 0


COMMANDS = {"create": _create, "show": _show, "load": _load}


def _add_bundle(parser: CommandParser) -> None:
    parser.add_argument("bundle", type=Path, metavar="FILE", help="what octavo bundle create wrote")
    parser.add_argument("--digest", type=_digest, metavar="sha256:…",
                        help="the bundle's own, as create printed it")  # fmt: skip


def _of_release(
    release: Path | None, images: Sequence[Path], chart: Path | None, sboms: Sequence[Path],
    platforms: Sequence[str],
) -> tuple[list[Path], list[Path], list[Path]]:  # fmt: skip
    if release is None:
        return list(images), [chart] if chart else [], list(sboms)
    charts = [chart] if chart else sorted(release.glob("octavo-*.tgz"))
    made, bills = (
        [path for path in sorted((release / folder).glob(pattern)) if _is_for(path, platforms)]
        for folder, pattern in (("images", "*.tar"), ("sbom", "*.cdx.json"))
    )
    return [*made, *images], charts, [*bills, *sboms]


def _is_for(path: Path, platforms: Sequence[str]) -> bool:
    """By its name, as `make release` gives it; what names no platform is for all."""
    named = [each for each in PLATFORMS if f"-{each.replace('/', '-')}." in path.name]
    return not named or named[0] in platforms


def _model(text: str) -> tuple[str, Path]:
    """Its name in the bundle and where its files are, fetched if they are not here."""
    name, separator, path = text.partition("=")
    if separator and "://" not in name:
        return name, Path(path)
    from octavo.commands.pull import pull_model
    from octavo.local.home import Home
    from octavo.models.library import ModelLibrary, parse_model_name

    parsed = parse_model_name(text)
    stored = pull_model(ModelLibrary(Home.find(os.environ)), parsed)
    short = re.sub(r"[^a-z0-9]+", "-", stored.name.rpartition("/")[2].lower()).strip("-")
    return short, stored.path


def _registry(place: str) -> RegistryClient:
    from octavo.bundle.registry import RegistryClient
    from octavo_common.remote.credentials import Credentials
    from octavo_common.remote.http import Http

    return RegistryClient(place, Http(stall_s=120), Credentials(os.environ))


def _print_items(items: Sequence[Item]) -> None:
    from octavo.models.table import columns, size_text

    rows = [
        (item.kind, f"{item.repository}:{item.tag}", size_text(item.size), item.manifest.digest)
        for item in items
    ]
    print(columns(("KIND", "NAME", "SIZE", "DIGEST"), rows))


def _print_next(loaded: LoadedBundle, *, has_registry: bool) -> None:
    for model in loaded.models:
        if has_registry:
            print(f"spec.model.uri: {model}")
        else:
            print(
                f"Copy {model} to a volume that engines mount, for spec.model.uri: pvc://CLAIM/FOLDER"
            )
    print(
        f"Install it: helm install octavo {loaded.chart} --namespace octavo-system "
        f"--create-namespace --values {loaded.values}"
    )


def _digest(text: str) -> str:
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", text):
        raise argparse.ArgumentTypeError(f"must be sha256: and 64 hexadecimal digits; got {text}")
    return text


if TYPE_CHECKING:
    from octavo.bundle.registry import RegistryClient
