"""Checksums of a folder of artefacts, and their signature: `python -m release.checksums`.

`key` makes an ed25519 key, `sign` writes SHA256SUMS and SHA256SUMS.sig, `verify` compares both with
the files. `sha256sum --check` and `openssl pkeyutl` read the same files.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

SUMS: Final = "SHA256SUMS"
SIGNATURE: Final = "SHA256SUMS.sig"
_LINE: Final = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def files_of(folder: Path) -> list[str]:
    """Names of all files below the folder but our own two, sorted.

    Raises SystemExit for what a list of checksums cannot hold: links, devices, odd names.
    """
    if not folder.is_dir():
        raise SystemExit(f"{folder} is not a folder; name the folder that has the artefacts")
    names = []
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() and not path.is_symlink():
            continue
        if path.is_symlink() or not path.is_file():
            raise SystemExit(f"{path} is not a regular file; remove it or copy its content there")
        if "\\" in name or not name.isprintable():
            raise SystemExit(f"{name!r} has a control character or backslash; rename the file")
        if name not in (SUMS, SIGNATURE):
            names.append(name)
    return sorted(names)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_key(key: Path) -> Path:
    """Writes a private key that only its owner can read, and returns the path of its public key."""
    public = key.with_name(f"{key.name}.pub")
    for path in (key, public):
        if path.exists():
            raise SystemExit(f"{path} exists; name another file, or move the old key away")
    private = _openssl("genpkey", "-algorithm", "ed25519")
    with os.fdopen(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(private)
    public.write_bytes(_openssl("pkey", "-in", key, "-pubout"))
    return public


def sign(folder: Path, key: Path) -> int:
    """Writes both files and returns the number of files that were summed."""
    if not key.is_file():
        raise SystemExit(f"{key} does not exist; make it: python -m release.checksums key {key}")
    names = files_of(folder)
    if not names:
        raise SystemExit(f"{folder} has no files to sign; make the artefacts first")
    # A signature of older sums must not stay beside new ones.
    (folder / SIGNATURE).unlink(missing_ok=True)
    lines = [f"{digest(folder / name)}  {name}\n" for name in names]
    (folder / SUMS).write_text("".join(lines))
    signature = _openssl("pkeyutl", "-sign", "-rawin", "-inkey", key, "-in", folder / SUMS)
    (folder / SIGNATURE).write_bytes(signature)
    return len(names)


def problems(folder: Path, public: Path) -> list[str]:
    """Sentences about what differs from what was signed; no file is read before the signature."""
    if not public.is_file():
        return [f"{public} does not exist; get the public key from where the release was announced"]
    for name in (SUMS, SIGNATURE):
        if not (folder / name).is_file():
            return [f"{folder / name} is missing; download it again"]
    command = ["pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", public,
               "-in", folder / SUMS, "-sigfile", folder / SIGNATURE]  # fmt: skip
    if _run_openssl(command).returncode != 0:
        return [f"{folder / SIGNATURE} is not a signature of {SUMS} by {public}; do not use them"]
    wanted = {}
    for line in (folder / SUMS).read_text().splitlines():
        found = _LINE.fullmatch(line)
        if found is None or ".." in PurePosixPath(found[2]).parts or found[2].startswith("/"):
            return [f"{folder / SUMS} has an invalid line: {line[:100]!r}"]
        wanted[found[2]] = found[1]
    there = set(files_of(folder))
    return [
        *(f"{name} is missing; download it again" for name in sorted(wanted.keys() - there)),
        *(f"{name} is not listed in {SUMS}; remove it" for name in sorted(there - wanted.keys())),
        *(
            f"{name} differs from its checksum; download it again"
            for name in sorted(there & wanted.keys())
            if digest(folder / name) != wanted[name]
        ),
    ]


def _openssl(*arguments: object) -> bytes:
    done = _run_openssl(arguments)
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip()[:300]
        raise SystemExit(f"openssl {arguments[0]} failed, it needs OpenSSL 3: {reason}")
    return done.stdout


def _run_openssl(arguments: Sequence[object]) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["openssl", *map(str, arguments)], capture_output=True, check=False)
    except FileNotFoundError:
        raise SystemExit("openssl is missing; install OpenSSL 3") from None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m release.checksums", description=__doc__.split("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    key = commands.add_parser("key", help="make an ed25519 key; the public one gets .pub")
    key.add_argument("key", type=Path)
    for name, text in (("sign", "the private key"), ("verify", "the public key")):
        command = commands.add_parser(name)
        command.add_argument("folder", type=Path)
        command.add_argument("--key", type=Path, required=True, help=text)
    args = parser.parse_args(argv)
    if args.command == "key":
        print(f"public key: {make_key(args.key)}")
    elif args.command == "sign":
        print(f"{sign(args.folder, args.key)} files signed in {args.folder / SUMS}")
    else:
        found = problems(args.folder, args.key)
        for problem in found:
            print(problem, file=sys.stderr)
        if found:
            return 1
        print(f"All files of {args.folder} are as signed.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
