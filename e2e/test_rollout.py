"""A changed spec reaches the pods, without an error for clients, even under faults."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from e2e.helm import NAMESPACE
from e2e.models import PACE, Model, real, simulated
from e2e.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from e2e.conftest import Platform
    from e2e.kubectl import Kubectl

NAMED_WITHIN_S = 10.0


def test_changed_flags_roll_through_without_a_failed_request(
    platform: Platform, space: Kubectl
) -> None:
    model = Model(space, simulated("rolling", replicas=2))
    model.await_settled(2)
    (old,) = model.revisions()
    with Traffic(platform.base_url, model.name) as traffic:
        traffic.await_answers(10)
        model.patch(engine={"args": {**PACE, "max-queue": 512}})
        model.await_settled(2)
        traffic.await_answers(10)
    traffic.assert_unbroken()
    (new,) = model.revisions()
    assert new != old


def test_the_real_model_rolls_without_a_failed_request(platform: Platform, space: Kubectl) -> None:
    model = Model(space, real("smollm2"))
    model.await_settled()
    with Traffic(platform.base_url, model.name, clients=2, tokens=8) as traffic:
        traffic.await_answers(4)
        model.patch(engine={"maxNumSeqs": 16})
        model.await_settled()
        traffic.await_answers(4)
    traffic.assert_unbroken(at_least=8)


def test_a_missing_image_is_named_while_the_old_revision_serves(
    platform: Platform, space: Kubectl
) -> None:
    model = Model(space, simulated("image"))
    model.await_settled()
    old = model.pods()[0]["metadata"]["name"]
    with empty_registry() as registry, Traffic(platform.base_url, model.name) as traffic:
        image = f"{registry}/octavo/engine-cpu:never-pushed"
        model.patch(engine={"image": image})

        def is_named() -> bool:
            condition = model.condition("Degraded")
            is_known = condition["reason"] in ("ImageNotFound", "ImagePullFailed")
            return is_known and condition["status"] == "True" and image in condition["message"]

        model.until(is_named, "sentence about the image", NAMED_WITHIN_S)
        assert model.condition("Ready")["status"] == "True", "the old revision serves"
        model.patch(engine={"image": None})
        model.await_settled()
        traffic.await_answers(10)
    traffic.assert_unbroken()
    assert [pod["metadata"]["name"] for pod in model.pods()] == [old]


def test_a_wrong_flag_is_named_while_the_old_revision_serves(
    platform: Platform, space: Kubectl
) -> None:
    model = Model(space, simulated("flag"))
    model.await_settled()
    with Traffic(platform.base_url, model.name) as traffic:
        model.patch(engine={"args": {**PACE, "max-queue": "plenty"}})

        def is_named() -> bool:
            condition = model.condition("Degraded")
            is_known = condition["reason"] == "EngineSettingsRefused"
            return is_known and "max-queue" in condition["message"]

        model.until(is_named, "sentence about the flag", NAMED_WITHIN_S)
        assert model.condition("Ready")["status"] == "True", "the old revision serves"
        model.patch(engine={"args": {**PACE, "max-queue": 64}})
        model.await_settled()
        traffic.await_answers(10)
    traffic.assert_unbroken()


def test_killed_operators_finish_the_rollout_when_they_are_back(
    platform: Platform, space: Kubectl
) -> None:
    model = Model(space, simulated("orphan", replicas=2))
    model.await_settled(2)
    operators = platform.pods("operator")
    with Traffic(platform.base_url, model.name) as traffic:
        model.patch(engine={"args": {**PACE, "max-queue": 512}})
        model.until(lambda: len(model.revisions()) == 2, "pod of the new revision", 30)
        for operator in operators:
            platform.kill(NAMESPACE, operator)
        model.await_settled(2)
        traffic.await_answers(10)
    traffic.assert_unbroken()
    assert len(model.revisions()) == 1


@contextmanager
def empty_registry() -> Iterator[str]:
    """Where every image is unknown: the runtime uses registries at this address without TLS."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Unknown)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class _Unknown(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """A registry that is not there has no log."""
