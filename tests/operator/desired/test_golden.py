"""The objects of each sample, letter by letter.

A changed pod template reaches engines with their next rollout: it must be seen in a review.
A changed revision replaces every engine of everybody who upgrades.
After a wanted change: OCTAVO_UPDATE_GOLDEN=1 pytest tests/operator/desired/test_golden.py
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo_operator.desired import desired_objects, revision_of
from octavo_operator.settings import OPTIONAL_KINDS, OperatorSettings
from octavo_operator.spec import LLMDeployment
from tests.fakes.deployments import UID, sample_bodies, with_images

GOLDEN = Path(__file__).parent / "golden"
SETTINGS = with_images(OperatorSettings(capabilities=OPTIONAL_KINDS))
BODIES = sample_bodies()


class PlainDumper(yaml.SafeDumper):
    """Each value where it belongs, however often it occurs."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def parsed(name: str) -> LLMDeployment:
    body = BODIES[name]
    return LLMDeployment.parse(
        {**body, "metadata": {**body["metadata"], "namespace": "models", "uid": UID}}
    )


@pytest.mark.parametrize("name", BODIES)
def test_objects_of_the_sample(name: str):
    objects = desired_objects(parsed(name), SETTINGS)
    text = yaml.dump_all(objects, Dumper=PlainDumper, sort_keys=False, width=100)
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("OCTAVO_UPDATE_GOLDEN"):
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8")


@pytest.mark.parametrize("name", BODIES)
def test_same_spec_same_bytes(name: str):
    assert desired_objects(parsed(name), SETTINGS) == desired_objects(parsed(name), SETTINGS)
    assert revision_of(parsed(name), SETTINGS) == revision_of(parsed(name), SETTINGS)


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == set(BODIES)
