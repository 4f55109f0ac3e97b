"""What `make audit` runs: locked packages, their versions, licences and known vulnerabilities.

Each package of `images/*.txt` has one version and hashes, meets the minimum of `pyproject.toml`,
and has a licence that we may ship, as far as it is installed here. Then pip-audit asks its service
for known vulnerabilities of exactly these versions. Ends with status 1 on a finding, and also where
the service could not be reached, unless that was left out by --offline.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

ROOT: Final = Path(__file__).parents[1]
UNKNOWN: Final = "unknown: not installed here"
# What would put our users under a duty that Apache-2.0 does not.
_COPYLEFT: Final = re.compile(
    r"\b(?:AGPL|GPL|SSPL)|Affero|(?<!Lesser )General Public", re.IGNORECASE
)
_FINDINGS: Final = 1  # pip-audit's status where it has found something, and also of its errors


@dataclass(frozen=True, slots=True)
class Locked:
    """One package of a lock file."""

    name: str
    version: str
    marker: str
    num_hashes: int
    file: str


def locked(text: str, file: str) -> Iterator[Locked]:
    """The packages of a lock file as uv writes it."""
    for entry in text.replace("\\\n", " ").splitlines():
        if not entry.strip() or entry.lstrip().startswith("#"):
            continue
        described, *hashes = entry.split("--hash=")
        requirement = Requirement(described.strip())
        pins = [each.version for each in requirement.specifier if each.operator == "=="]
        yield Locked(
            canonicalize_name(requirement.name), pins[0] if len(pins) == 1 else "",
            str(requirement.marker or ""), len(hashes), file,
        )  # fmt: skip


def required(project: dict[str, object]) -> Iterator[Requirement]:
    """All that pyproject.toml names, in every extra; not its own extras."""
    dependencies, extras = project["dependencies"], project["optional-dependencies"]
    assert isinstance(dependencies, list)
    assert isinstance(extras, dict)
    for line in (*dependencies, *(line for lines in extras.values() for line in lines)):
        requirement = Requirement(line)
        if requirement.name != project["name"]:
            yield requirement


def licence(name: str) -> str:
    """Of the installed package, as it declares it; the first line of a whole text."""
    try:
        described = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return UNKNOWN
    classifiers = [
        each.rpartition(" :: ")[2]
        for each in described.get_all("Classifier") or []
        if each.startswith("License :: ")
    ]
    declared = _field(described, "License-Expression") or ", ".join(classifiers)
    first = (declared or _field(described, "License")).strip().partition("\n")[0]
    return first[:60] or "not declared"


def _field(described: metadata.PackageMetadata, name: str) -> str:
    return "".join(described.get_all(name) or [])


def findings(packages: Sequence[Locked], requirements: Iterable[Requirement]) -> Iterator[str]:
    """Sentences about what is wrong with the lock files or with what is installed."""
    for package in packages:
        where = f"{package.file}: {package.name}"
        if not package.version:
            yield f"{where} is not pinned to one version"
        if not package.num_hashes:
            yield f"{where} has no hash"
        if _COPYLEFT.search(licence(package.name)):
            yield f"{where} has the licence {licence(package.name)}"
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        for package in packages:
            if package.name == name and package.version not in requirement.specifier:
                yield f"{package.file}: {name} {package.version} does not meet {requirement}"
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            yield f"installed: {name} {installed} does not meet {requirement}"


def show(packages: Sequence[Locked]) -> None:
    """Each package once, with its versions and its licence."""
    versions: dict[str, set[str]] = {}
    for package in packages:
        versions.setdefault(package.name, set()).add(package.version)
    for name, found in sorted(versions.items()):
        print(f"{name:44} {', '.join(sorted(found)):24} {licence(name)}")
    num_unknown = sum(licence(name) == UNKNOWN for name in versions)
    print(
        f"\n{len(versions)} packages, {num_unknown} of them with a licence that is not known here"
    )


def vulnerabilities(files: Sequence[Path], timeout_s: int = 15) -> str:
    """Runs pip-audit over lock files. Returns a sentence where it fails or finds something."""
    # Strict: else it ends with 0 though its service knew none of the packages.
    command = [sys.executable, "-m", "pip_audit", "--strict", "--disable-pip", "--require-hashes",
               "--progress-spinner=off", f"--timeout={timeout_s}"]  # fmt: skip
    for file in files:
        command += ["--requirement", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, end="")
    if done.returncode == 0:
        return ""
    if done.returncode == _FINDINGS and "known vulnerabilit" in done.stderr:
        return done.stderr.strip().splitlines()[-1]
    reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    return f"Known vulnerabilities were not checked, pip-audit failed: {reason[:300]}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m release.audit", description=__doc__.split("\n")[0]
    )
    parser.add_argument("files", nargs="*", type=Path, help="lock files; default: all of images/")
    parser.add_argument(
        "--offline", action="store_true", help="leave out the search for known vulnerabilities"
    )
    args = parser.parse_args(arguments)
    files = args.files or sorted((ROOT / "images").glob("*.txt"))
    packages = [each for file in files for each in locked(file.read_text(), file.name)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    show(packages)
    problems = list(findings(packages, required(project)))
    if args.offline:
        print("Known vulnerabilities were not searched for: --offline.")
    elif problem := vulnerabilities(files):
        problems.append(problem)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
