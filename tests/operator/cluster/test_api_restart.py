"""The API server is killed in the middle of a rollout and comes back with what it had stored."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.fakes.live_operator import conditions, engines, live, operator, until
from tests.fakes.operator import make_deployment
from tests.fakes.operator_story import is_settled, snapshot

pytestmark = pytest.mark.cluster
RECOVERY_S = 15.0  # on a busy machine; the watches come back within two


def test_a_restart_in_the_middle_of_a_rollout_loses_nothing_and_doubles_nothing(
    apiserver, namespace, caplog
):
    server = apiserver

    async def story() -> None:
        deployment = make_deployment(namespace=namespace, replicas=2)

        def is_serving() -> bool:
            live(server, namespace)
            return is_settled(server.get(deployment))

        async with operator(server, namespace) as found:
            server.create(deployment)
            await until(is_serving)
            (old,) = engines(server, namespace)
            before = await asyncio.to_thread(snapshot, server, namespace)

            server.patch(deployment, {"spec": {"engine": {"maxNumSeqs": 7}}})
            await until(lambda: len(engines(server, namespace)) == 2)
            uids = [body["metadata"]["uid"] for body in engines(server, namespace)]
            server.kill()
            await until(lambda: "Could not reach the Lease" in caplog.text)
            server.start_again()
            await asyncio.to_thread(server.wait_until_ready)
            began_at = time.monotonic()
            assert [body["metadata"]["uid"] for body in engines(server, namespace)] == uids
            await until(is_serving, within_s=RECOVERY_S)

            (new,) = engines(server, namespace)
            assert new["metadata"]["name"] != old["metadata"]["name"]
            assert new["spec"]["replicas"] == 2
            after = await asyncio.to_thread(snapshot, server, namespace)
            assert len(after) == len(before)
            # Its watches live as well: what comes now is seen, long before the next resync.
            server.patch(deployment, {"spec": {"suspend": True}})
            await until(lambda: conditions(server, namespace)["Ready"][1] == "Suspended")
            assert time.monotonic() - began_at < RECOVERY_S
            assert found.metrics.bugs == 0

    asyncio.run(story())
