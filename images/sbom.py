"""Writes what an image is made of as CycloneDX JSON: Python's packages and Debian's.

The same image gives the same bytes: no time and no random number is in it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import uuid
from email.parser import BytesHeaderParser, HeaderParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from images.archive import Image, opened

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_DPKG = re.compile(r"var/lib/dpkg/(status|status\.d/[^/]+)")
_METADATA = re.compile(r".*/[^/]+\.dist-info/METADATA")
_DISTRIBUTION = re.compile(r'^(ID|VERSION_ID)="?([^"\n]*)"?$', re.M)

Component = dict[str, Any]


def bill(image: Image, *, name: str = "", version: str = "") -> dict[str, Any]:
    """The whole document, by default with the image's own name and version."""
    components = [*sorted(_python(image), key=_order), *sorted(_debian(image), key=_order)]
    own_name, _, own_version = image.tags[0].rpartition(":") if image.tags else ("image", "", "")
    identity = uuid.uuid5(uuid.NAMESPACE_URL, " ".join(image.layers))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{identity}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "container",
                "bom-ref": image.layers[-1],
                "name": name or own_name,
                "version": version or own_version,
            }
        },
        "components": components,
        "dependencies": [
            {"ref": image.layers[-1], "dependsOn": [c["bom-ref"] for c in components]}
        ],
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m images.sbom", description=__doc__)
    parser.add_argument("archives", nargs="+", type=Path, help="images, as docker save writes them")
    parser.add_argument("--to", type=Path, default=Path(), metavar="FOLDER")
    args = parser.parse_args(argv)
    args.to.mkdir(parents=True, exist_ok=True)
    for archive in args.archives:
        with opened(archive) as image:
            document = bill(image)
        path = args.to / f"{file_name(document)}.cdx.json"
        path.write_text(json.dumps(document, indent=2) + "\n")
        print(f"{path}: {len(document['components'])} components")
    return 0


def _python(image: Image) -> Iterator[Component]:
    for name in image.files:
        if not _METADATA.fullmatch(name):
            continue
        metadata = BytesHeaderParser().parsebytes(image.read(name))
        known = metadata["Name"].lower().replace("_", "-")
        component = {
            "type": "library",
            "bom-ref": f"pkg:pypi/{known}@{metadata['Version']}",
            "name": metadata["Name"],
            "version": metadata["Version"],
            "purl": f"pkg:pypi/{known}@{metadata['Version']}",
        }
        if text := metadata["License-Expression"]:
            component["licenses"] = [{"expression": text}]
        elif (text := metadata["License"]) and "\n" not in text:
            component["licenses"] = [{"license": {"name": text}}]
        yield component


def _debian(image: Image) -> Iterator[Component]:
    system = dict(_DISTRIBUTION.findall(_text(image, "usr/lib/os-release")))
    distribution = f"{system.get('ID', 'debian')}-{system.get('VERSION_ID', '')}".rstrip("-")
    for name in image.files:
        if not _DPKG.fullmatch(name) or name.endswith(".md5sums"):
            continue
        for paragraph in image.read(name).decode().split("\n\n"):
            fields = HeaderParser().parsestr(paragraph.lstrip("\n"))
            is_there = "Package" in fields and "not-installed" not in fields.get("Status", "")
            if not is_there:
                continue
            package, version = fields["Package"], fields["Version"]
            where = f"arch={fields['Architecture']}&distro={distribution}"
            purl = f"pkg:deb/debian/{package}@{version.replace(':', '%3A')}?{where}"
            yield {
                "type": "library",
                "bom-ref": purl,
                "name": package,
                "version": version,
                "purl": purl,
            }


def _text(image: Image, name: str) -> str:
    return image.read(name).decode() if name in image.files else ""


def _order(component: Mapping[str, str]) -> tuple[str, str]:
    return component["name"].lower(), component["version"]


def file_name(document: Mapping[str, Any]) -> str:
    return str(document["metadata"]["component"]["name"].rpartition("/")[2])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
