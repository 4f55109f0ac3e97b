"""What the fetching step says and takes, and what the operator reads and gives: the same words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from octavo.commands import fetch as command
from octavo.fetch.errors import FetchError
from octavo.fetch.errors import FetchReason as FetchReason
from octavo_common.remote.credentials import VARIABLE
from octavo_operator.desired.weights import fetch_arguments, weights
from octavo_operator.reasons import Reason
from octavo_operator.report.faults import FETCH_REASONS, pod_faults
from octavo_operator.spec import LLMDeployment
from tests.fakes.operator import make_deployment

if TYPE_CHECKING:
    from octavo.fetch.fetch import FetchRequest

DIGEST = "sha256:" + "0" * 64


def test_every_reason_of_the_step_is_a_reason_of_conditions_and_none_is_left_over():
    assert set(FETCH_REASONS) == {reason.value for reason in FetchReason}


@pytest.mark.parametrize("reason", FetchReason)
def test_what_the_step_writes_is_what_the_condition_says(reason, tmp_path, monkeypatch):
    file = tmp_path / "termination-log"
    file.touch()
    monkeypatch.setattr(command, "TERMINATION_FILE", file)
    command._tell_failure(FetchError(reason, "do this"))
    ended = {"terminated": {"exitCode": 10, "reason": "Error", "message": file.read_text()}}
    pod = {
        "metadata": {"name": "p", "uid": "u"},
        "status": {"initContainerStatuses": [{"name": "fetch", "state": ended}]},
    }
    (fault,) = pod_faults(pod)
    assert (fault.reason, fault.fact) == (Reason(reason.value), "do this")


def test_the_step_understands_every_argument_that_the_operator_gives(tmp_path, monkeypatch):
    model = {"uri": "hf://org/name", "revision": "v1", "digest": DIGEST}
    arguments = fetch_arguments(LLMDeployment.parse(make_deployment(model=model)).model, "/d")
    given: list[FetchRequest] = []

    def fetch(request: FetchRequest, progress: object) -> None:
        given.append(request)
        raise FetchError(FetchReason.NOT_FOUND, "m")

    monkeypatch.setattr("octavo.fetch.fetch.fetch", fetch)
    assert command.main("octavo fetch", arguments) == 11
    (request,) = given
    assert (request.uri, str(request.folder)) == ("hf://org/name", "/d")
    assert (request.revision, request.digest) == ("v1", DIGEST)


def test_the_step_finds_the_secret_where_the_operator_mounts_it():
    model = {"uri": "hf://org/name", "secretRef": {"name": "hub"}}
    deployment = LLMDeployment.parse(make_deployment(model=model))
    (step,) = weights(deployment, image="i", pull_policy="Always").init_containers
    variables = {variable["name"]: variable["value"] for variable in step["env"]}
    mounts = {mount["mountPath"] for mount in step["volumeMounts"]}
    assert variables[VARIABLE] in mounts
