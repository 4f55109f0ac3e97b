"""All that a release has, made and then tried, in build/release: `python -m release.make`.

Wheels, sdist, images as OCI layouts, their SBOMs, the chart, checksums and a signature. What was
made is installed, rendered or read again before it is signed.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import yaml

from images import debian
from images.archive import opened
from images.sbom import bill
from octavo.bundle.blobs import REFERENCE, BlobContent
from octavo.bundle.contents import IMAGE_VALUES, digest_values
from octavo.bundle.layout import LayoutReader, OciLayout, platform_text
from release import assembled, checksums, emulated, image_trial, version, wheels
from tests.tools.build import tool
from tests.tools.build import why_not as why_no_chart

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from octavo.bundle.blobs import Descriptor

ROOT: Final = Path(__file__).resolve().parents[1]
USER: Final = "65532:65532"
# The compressed image; and, at one time, its packages, its layers, its archive and its layout.
GB_MADE: Final = {"engine-cpu": 0.2, "engine-cuda": 3.5, "router": 0.1, "operator": 0.1}
GB_WHILE_MADE: Final = {"engine-cpu": 1.5, "engine-cuda": 16.0, "router": 1.0, "operator": 1.0}
# scikit-build-core's own entry point; `build` would bring an environment to call it in.
SDIST: Final = (
    "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is made, and where."""

    to: Path
    version: str
    machines: tuple[str, ...] = tuple(wheels.TARGETS)
    isas: str = "all"
    images: tuple[str, ...] = assembled.NAMES


def make_wheels(plan: Plan) -> None:
    """One for each processor; that for this one has to stream an answer, others an emulated one."""
    for machine in plan.machines:
        wheel = wheels.build_wheel(wheels.TARGETS[machine], plan.to, plan.isas)
        if machine == os.uname().machine:
            answer = wheels.try_install(wheel, ROOT / "build" / "zig" / "try")
            print(f"{wheel.name}, installed into an empty environment, streamed {answer!r}")
        elif reason := emulated.why_not(machine):
            print(f"{wheel.name} was compiled and checked, but not run: {reason}")
        else:
            folder = ROOT / "build" / "zig" / f"try-{machine}"
            text = emulated.try_emulated(wheel, machine, folder)
            if "Paris" not in text:
                raise SystemExit(f"{wheel.name}, emulated, generated {text!r}")
            print(f"{wheel.name}, on an emulated processor, generated {text!r}")


def make_sdist(plan: Plan) -> None:
    """It is compiled, for this machine alone, in an empty environment."""
    subprocess.run([sys.executable, "-c", SDIST, str(plan.to)], check=True, cwd=ROOT)
    sdist = plan.to / f"octavo-{plan.version}.tar.gz"
    check_sdist(sdist)
    answer = wheels.try_install(sdist, ROOT / "build" / "zig" / "try-sdist", OCTAVO_ISAS="host")
    print(f"{sdist.name}, compiled in an empty environment, streamed {answer!r}")


def check_sdist(sdist: Path) -> None:
    """Raises SystemExit where sources are missing, or what is built is among them."""
    with tarfile.open(sdist) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    wanted = {"pyproject.toml", "LICENSE", "README.md", "csrc/CMakeLists.txt", "octavo/cli.py"}
    if missing := sorted(wanted - names):
        raise SystemExit(f"{sdist.name} lacks {', '.join(missing)}")
    if built := sorted(name for name in names if name.endswith((".so", ".pyc", ".whl"))):
        raise SystemExit(f"{sdist.name} has {built[0]}, which is built and not a source")


def why_no_images(plan: Plan, free_bytes: int) -> str:
    """What images lack here, or ''; `free_bytes`: of the disk that build is on."""
    if reason := assembled.why_not():
        return reason
    needed = max(GB_WHILE_MADE[name] for name in plan.images) + len(plan.machines) * sum(
        GB_MADE[name] for name in plan.images
    )
    if free_bytes / 1e9 >= needed:
        return ""
    smaller = " ".join(name for name in assembled.NAMES if name != "engine-cuda")
    return (
        f"{', '.join(plan.images)} need {needed:.0f} GB of free disk below {ROOT / 'build'}, where "
        f"{free_bytes / 1e9:.0f} GB are free; free some, or make fewer: "
        f"RELEASE_ARGS='--image {smaller}'"
    )


def make_images(plan: Plan) -> None:
    """Each image for each processor, with an SBOM; what can run here is run."""
    work = ROOT / "build" / "images"
    for machine in plan.machines:
        wheel = wheel_for(plan, machine)
        for name in plan.images:
            archive = assembled.assemble(name, machine, wheel, plan.version, work)
            write_image(plan, name, archive)
            if reason := image_trial.why_not(machine):
                print(f"  it was not run: {reason}")
            else:
                print(f"  run, it said: {image_trial.run_image(name, archive, machine, work)}")
            archive.unlink()


def wheel_for(plan: Plan, machine: str) -> Path:
    """What the step `wheels` left. Raises SystemExit."""
    tag = f"cp{''.join(map(str, debian.PYTHON))}"
    if found := sorted(plan.to.glob(f"octavo-{plan.version}-{tag}-*_{machine}.whl")):
        return found[-1]
    raise SystemExit(
        f"{plan.to} has no wheel for {machine}, of which images are made; make it first: "
        "RELEASE_ARGS='--only wheels images'"
    )


def write_image(plan: Plan, name: str, archive: Path) -> Path:
    """Its layout and its SBOM, read again."""
    for folder in ("images", "sbom"):
        (plan.to / folder).mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=plan.to.parent) as scratch:
        layout = OciLayout(Path(scratch))
        image = layout.add_docker_archive(archive, f"octavo/{name}:{plan.version}")
        path = plan.to / "images" / image_file(name, plan.version, image)
        layout.write(path)
    check_image(path, plan.version)
    with opened(archive) as read:
        document = bill(read, name=f"octavo/{name}", version=plan.version)
    sbom = plan.to / "sbom" / f"{name}-{platform_text(image).replace('/', '-')}.cdx.json"
    sbom.write_text(json.dumps(document, indent=2) + "\n")
    print(f"{path.name}: {image.digest}, {len(document['components'])} components", flush=True)
    return path


def image_file(name: str, number: str, image: Descriptor) -> str:
    return f"octavo-{name}-{number}-{platform_text(image).replace('/', '-')}.oci.tar"


def check_image(path: Path, number: str) -> Descriptor:
    """Each digest, of the layers also unpacked, and what the image says of itself. Raises
    BundleError or SystemExit."""
    reader = LayoutReader(path)
    reader.verify()
    (image,) = reader.manifests
    config_part, *layers = reader.parts(image)
    config = json.loads(reader.blob(config_part).whole())
    found = [_digest_unpacked(reader.blob(layer)) for layer in layers]
    if found != config["rootfs"]["diff_ids"]:
        raise SystemExit(f"{path.name}: its layers are not those of its configuration")
    labels = config["config"].get("Labels") or {}
    if (label := labels.get("org.opencontainers.image.version")) != number:
        raise SystemExit(f"{path.name} has the version {label}, not {number}")
    if config["config"].get("User") != USER:
        raise SystemExit(f"{path.name} runs as {config['config'].get('User') or 'root'}")
    return image


def make_chart(plan: Plan) -> None:
    """Packed by Helm, without times; linted and rendered with the images' digests."""
    with tempfile.TemporaryDirectory(dir=plan.to.parent) as scratch:
        _helm("package", ROOT / "charts" / "octavo", f"--destination={scratch}")
        (packed,) = Path(scratch).glob("octavo-*.tgz")
        chart = plan.to / packed.name
        chart.write_bytes(without_times(packed.read_bytes()))
    if chart.name != f"octavo-{plan.version}.tgz":
        raise SystemExit(f"the chart is {chart.name}, the version is {plan.version}")
    check_chart(chart, sorted((plan.to / "images").glob("*.oci.tar")))


def check_chart(chart: Path, archives: Sequence[Path]) -> None:
    """Raises SystemExit where Helm finds a fault, or an image's digest does not arrive in a pod."""
    with tempfile.TemporaryDirectory(dir=chart.parent) as scratch:
        layout = OciLayout(Path(scratch))
        for path in archives:
            layout.add_layout(path)
        described = layout.merge_platforms()
    values = {"images": {"registry": "registry.example"}, **digest_values(described)}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "values.yaml"
        file.write_text(yaml.safe_dump(values))
        _helm("lint", "--strict", chart, f"--values={file}")
        rendered = _helm("template", "octavo", chart, f"--values={file}")
    for image in described:
        repository = image.annotations[REFERENCE].rpartition(":")[0]
        assert repository in IMAGE_VALUES
        if f"registry.example/{repository}@{image.digest}" not in rendered:
            raise SystemExit(f"{chart.name} does not use the digest of {repository}")
    print(f"{chart.name} is linted, and rendered with the digests of {len(described)} images")


def without_times(archive: bytes) -> bytes:
    """The same bytes for the same files."""
    target = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as old,
        gzip.GzipFile("", "wb", fileobj=target, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as new,
    ):
        for info in sorted(old.getmembers(), key=lambda member: member.name):
            info.mtime, info.pax_headers = 0, {}
            new.addfile(info, old.extractfile(info))
    return target.getvalue()


def finish(plan: Plan, key: Path) -> None:
    """Checksums and signature, compared with the files."""
    if not key.exists():
        print(f"{key} was made. Keep it away from the artefacts; {key}.pub is for everybody.")
        checksums.make_key(key)
    checksums.sign(plan.to, key)
    if found := checksums.problems(plan.to, key.with_name(f"{key.name}.pub")):
        raise SystemExit("\n".join(found))


STEPS: Final[Mapping[str, Callable[[Plan], None]]] = {
    "wheels": make_wheels,
    "sdist": make_sdist,
    "images": make_images,
    "chart": make_chart,
}


def _helm(*words: object) -> str:
    done = subprocess.run(
        [tool("helm"), *map(str, words)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"helm {words[0]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def _digest_unpacked(layer: BlobContent) -> str:
    found = hashlib.sha256()
    unpacking = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)  # gzip
    for block in layer:
        found.update(unpacking.decompress(block))
    found.update(unpacking.flush())
    return f"sha256:{found.hexdigest()}"


def _show(folder: Path, costs: Mapping[str, Cost]) -> None:
    print(f"\n{folder}:")
    for name in [*checksums.files_of(folder), checksums.SUMS, checksums.SIGNATURE]:
        print(f"  {name:60} {(folder / name).stat().st_size / 1e6:9.1f} MB")
    print("; ".join(f"{name} {cost}" for name, cost in costs.items()))


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a step. On a busy machine the wall's time is more than the work."""

    processor_s: float
    wall_s: float

    def __str__(self) -> str:
        return f"{self.wall_s:.0f} s, {self.processor_s:.0f} s of a core"


def _processor_seconds() -> float:
    """Of this process and of all that it started, as far as they have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def make(plan: Plan, steps: Sequence[str]) -> dict[str, Cost]:
    """What each step took. Where one fails, a line tells how to go on with what is there."""
    costs = {}
    for number, name in enumerate(steps):
        print(f"--- {name}", flush=True)
        used, started = _processor_seconds(), time.monotonic()
        try:
            STEPS[name](plan)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            rest = " ".join(steps[number:])
            print(
                f"The step {name} did not end, and nothing is signed. What was made stays in "
                f"{plan.to}; to go on: make release RELEASE_ARGS='--only {rest}'",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            if isinstance(error, subprocess.CalledProcessError):
                command = shlex.join(map(str, error.cmd))
                raise SystemExit(f"it ended with status {error.returncode}: {command}") from None
            raise
        costs[name] = Cost(_processor_seconds() - used, time.monotonic() - started)
        print(f"--- {name}: {costs[name]}", flush=True)
    return costs


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m release.make", description=__doc__)
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "release", metavar="DIR")
    parser.add_argument(
        "--only", nargs="+", choices=STEPS, default=list(STEPS), help="these steps; others stay"
    )
    parser.add_argument(
        "--machine", nargs="+", choices=sorted(wheels.TARGETS), default=list(wheels.TARGETS)
    )
    parser.add_argument("--isas", default="all", help="instruction sets, as OCTAVO_ISAS")
    parser.add_argument(
        "--image", nargs="+", choices=assembled.NAMES, default=list(assembled.NAMES),
        help="of the step images; engine-cuda takes several GB",
    )  # fmt: skip
    parser.add_argument(
        "--key",
        type=Path,
        default=Path(os.environ.get("RELEASE_KEY", ROOT / "release.key")),
        help="signs; made where it is missing",
    )
    args = parser.parse_args(arguments)
    named = version.versions(ROOT)
    if found := version.problems(named, None):
        raise SystemExit("\n".join(found))
    if set(args.only) == set(STEPS):
        shutil.rmtree(args.to, ignore_errors=True)
    args.to.mkdir(parents=True, exist_ok=True)
    plan = Plan(
        args.to.resolve(), named["pyproject.toml"], tuple(args.machine), args.isas,
        tuple(args.image),
    )  # fmt: skip
    steps = [name for name in STEPS if name in args.only]
    free = shutil.disk_usage(plan.to).free
    reasons = {
        "images": why_no_images(plan, free) if "images" in steps else "",
        "chart": why_no_chart() if "chart" in steps else "",
    }
    if missing := [f"{step}: {reason}" for step, reason in reasons.items() if reason]:
        raise SystemExit(f"cannot be made here: {'; '.join(missing)}")
    costs = make(plan, steps)
    finish(plan, args.key)
    _show(plan.to, costs)


if __name__ == "__main__":
    main()
