"""The chart as Helm renders it, hundreds of times over in one process."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml

from tests.tools import build

if TYPE_CHECKING:
    from collections.abc import Mapping

CHART = Path(__file__).parents[2] / "charts" / "octavo"
NOTES = "octavo/templates/NOTES.txt"
REGISTRY = {"images": {"registry": "registry.example.com"}}  # without one nothing is rendered
Object = dict[str, Any]


class RenderError(Exception):
    """Helm refuses the values, or a template does."""


class Chart:
    """A context manager around the process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [build.tool("render"), str(CHART)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._known: dict[str, list[Object]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def files(
        self,
        values: Mapping[str, Any],
        *,
        release: str = "octavo",
        namespace: str = "octavo-system",
    ) -> dict[str, str]:
        """Each template's text, with REGISTRY where `values` name none. Raises RenderError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        question = {
            "values": laid_over(REGISTRY, values),
            "release": release,
            "namespace": namespace,
        }
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise RenderError(answer["error"])
        return dict(answer["files"])

    def objects(
        self,
        values: Mapping[str, Any],
        *,
        release: str = "octavo",
        namespace: str = "octavo-system",
        crds: bool = False,
    ) -> list[Object]:
        """What would be applied, hooks included; the large CRD only where it is requested."""
        if not crds:
            values = laid_over({"crds": {"install": False}}, values)
        key = json.dumps([values, release, namespace])
        if key not in self._known:  # the same values are looked at in several ways
            self._known[key] = self._parse(values, release, namespace)
        return copy.deepcopy(self._known[key])

    def _parse(self, values: Mapping[str, Any], release: str, namespace: str) -> list[Object]:
        found = []
        for path, text in sorted(self.files(values, release=release, namespace=namespace).items()):
            if path != NOTES and path.endswith(".yaml"):
                found += [body for body in yaml.load_all(text, Loader=Loader) if body]
        return found


def laid_over(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`more` wins; maps are merged, as Helm does it."""
    merged = dict(base)
    for key, value in more.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            value = laid_over(below, value)
        merged[key] = value
    return merged


def nested(path: str, value: Any) -> dict[str, Any]:
    """a.b, 1 -> {"a": {"b": 1}}"""
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


def one(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = (o for o in objects if (o["kind"], o["metadata"]["name"]) == (kind, name))
    return found


class Loader(yaml.CSafeLoader):
    """Refuses a key that is given twice: the API server would silently take one of them."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if len(keys) != len(set(keys)):
            raise yaml.constructor.ConstructorError(None, None, f"{keys}: twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)
