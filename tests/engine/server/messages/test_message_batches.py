"""/v1/messages/batches as the official client and raw HTTP see them, through restarts too."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from octavo_engine.server.limits import RequestLimits
from octavo_engine.server.openai.batches import runner
from octavo_engine.server.openai.batches.lines import FinishedLine, done_so_far
from octavo_engine.server.settings import ServerSettings
from octavo_engine.state.request import BACKGROUND
from tests.engine.server.batches.filing import begin, filing, lines, question
from tests.engine.server.batches.filing import over as openai_over
from tests.fakes.engine import FakeEngine
from tests.fakes.process import serving
from tests.fakes.server import running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

    from octavo_engine.server.openai.batches.storage import Storage
    from tests.fakes.server import RunningServer

pytestmark = pytest.mark.slow


URL = "/v1/messages/batches"
FLAGS = ("m", "--served-model-name", "sim", "--api-key", "secret", "--max-model-len", "512")


def params(**more: Any) -> dict[str, Any]:
    hi = [{"role": "user", "content": "hi"}]
    return {"model": "fake", "max_tokens": 4, "messages": hi} | more


def item(custom_id: str, **more: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "params": params(**more)}


def create(client: httpx.Client, *items: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(URL, json={"requests": list(items)})
    batch: dict[str, Any] = answer.raise_for_status().json()
    return batch


def retrieve(client: httpx.Client, batch: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = client.get(f"{URL}/{batch['id']}").raise_for_status().json()
    return answer


def ended(client: httpx.Client, batch: dict[str, Any]) -> dict[str, Any]:
    while (now := retrieve(client, batch))["processing_status"] != "ended":
        assert now["ended_at"] is now["results_url"] is None
    return now


def results(client: httpx.Client, batch: dict[str, Any]) -> dict[str, dict[str, Any]]:
    answer = client.get(batch["results_url"]).raise_for_status()
    assert answer.headers["content-type"] == "application/x-jsonl"
    found = [json.loads(line) for line in answer.text.splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each["result"] for each in found}


def go_on(server: RunningServer) -> None:
    """With what an earlier server left."""
    assert server.service.batches is not None
    server.call(server.service.batches.start)


@contextmanager
def official(url: str, key: str = "x") -> Iterator[Any]:
    import anthropic  # seconds, which only those pay who use it

    with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as client:
        yield client


# ── the life of a batch ──


def test_the_official_client_sees_a_batch_from_its_beginning_to_its_end(tmp_path):
    with filing(tmp_path) as (server, http), official(server.url) as client:
        batches = client.messages.batches
        batch = batches.create(requests=[item("good"), item("bad", max_tokens=0)])
        assert (batch.type, batch.request_counts.processing) == ("message_batch", 2)
        assert (batch.expires_at - batch.created_at).total_seconds() == 24 * 3600
        ended(http, {"id": batch.id})

        done = batches.retrieve(batch.id)
        assert done.processing_status == "ended"
        counts = done.request_counts
        assert (counts.processing, counts.succeeded, counts.errored) == (0, 1, 1)
        assert (counts.canceled, counts.expired) == (0, 0)
        assert done.ended_at >= done.created_at
        assert done.cancel_initiated_at is done.archived_at is None

        found = {each.custom_id: each.result for each in batches.results(batch.id)}
        assert found["good"].type == "succeeded"
        direct = client.messages.create(**params())
        assert found["good"].message.content == direct.content
        assert found["good"].message.usage == direct.usage
        assert found["bad"].type == "errored"
        assert found["bad"].error.error.type == "invalid_request_error"
        assert "max_tokens" in found["bad"].error.error.message

        assert [each.id for each in batches.list()] == [batch.id]
        assert batches.delete(batch.id).type == "message_batch_deleted"
        assert [each.id for each in batches.list()] == []
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"] == []


def test_requests_of_a_batch_run_in_the_background(tmp_path):
    with filing(tmp_path) as (server, client):
        ended(client, create(client, item("a")))
        assert [requested["priority"] for _, _, requested in server.engine.requests] == [BACKGROUND]


def test_a_cancelled_batch_has_a_result_for_every_request(tmp_path):
    engine = FakeEngine(hold_after=2)
    with filing(tmp_path, engine, batch_concurrency=1) as (server, client):
        batch = create(client, item("short", max_tokens=1), item("long", max_tokens=9), item("c"))
        server.wait_for(engine.holding)
        answer = client.post(f"{URL}/{batch['id']}/cancel").json()
        assert answer["processing_status"] == "canceling"
        assert answer["cancel_initiated_at"] is not None
        done = ended(client, batch)
        assert done["request_counts"] == {
            "processing": 0, "succeeded": 1, "errored": 0, "canceled": 2, "expired": 0,
        }  # fmt: skip
        found = results(client, done)
        assert {id_: result["type"] for id_, result in found.items()} == {
            "short": "succeeded", "long": "canceled", "c": "canceled",
        }  # fmt: skip
        assert client.post(f"{URL}/{batch['id']}/cancel").json() == done


@pytest.mark.parametrize("slow_read", [False, True])
def test_what_is_not_answered_in_time_has_expired(slow_read, tmp_path, monkeypatch):
    engine = FakeEngine(hold_after=2)
    with filing(tmp_path, engine, batch_concurrency=1) as (server, client):
        batch = create(client, item("a", max_tokens=1), item("b"), item("c", max_tokens=1))
        server.wait_for(engine.holding)
    record = tmp_path / "batches" / f"{batch['id']}.json"
    fields = json.loads(record.read_bytes())
    fields["batch"]["expires_at"] = fields["batch"]["created_at"]
    record.write_text(json.dumps(fields))
    if slow_read:  # the thread that reads what was answered outlives the batch's time
        waits = iter((0.2,))

        def read_slowly(path: Path, storage: Storage) -> FinishedLine:
            found = done_so_far(path, storage)
            time.sleep(next(waits, 0))
            return found

        monkeypatch.setattr(runner, "done_so_far", read_slowly)
    with filing(tmp_path) as (server, client):
        go_on(server)
        done = ended(client, batch)
        if slow_read:
            time.sleep(0.4)
            done = retrieve(client, batch)
        assert done["request_counts"] == {
            "processing": 0, "succeeded": 1, "errored": 0, "canceled": 0, "expired": 2,
        }  # fmt: skip
        assert [result["type"] for result in results(client, done).values()] == [
            "succeeded", "expired", "expired",
        ]  # fmt: skip


def test_a_batch_outlives_the_death_of_its_server(tmp_path):
    folder = ("--files-dir", str(tmp_path))
    slow = ("--batch-concurrency", "2", "--sim-time-scale", "1")
    items = [item(f"r{n}", model="sim", max_tokens=8, seed=n) for n in range(10)]
    with serving(*FLAGS, *folder, *slow) as server, official(server.url, "secret") as client:
        batch = client.messages.batches.create(requests=items)
        output = tmp_path / "batches" / f"{batch.id}.output"
        while not output.exists() or output.read_bytes().count(b"\n") < 2:
            assert client.messages.batches.retrieve(batch.id).processing_status == "in_progress"
        server.process.kill()
        server.process.wait(60)

    fast = ("--sim-time-scale", "0.1")
    with serving(*FLAGS, *folder, *fast) as server, official(server.url, "secret") as client:
        while (done := client.messages.batches.retrieve(batch.id)).processing_status != "ended":
            pass
        assert done.request_counts.succeeded == 10
        found = {each.custom_id: each.result for each in client.messages.batches.results(batch.id)}
        for n in range(10):  # those before and those after the death alike
            direct = client.messages.create(**params(model="sim", max_tokens=8),
                                            extra_body={"seed": n})  # fmt: skip
            assert found[f"r{n}"].message.content == direct.content


def test_a_cancel_goes_on_after_a_restart(tmp_path):
    engine = FakeEngine(hold_after=0)
    with filing(tmp_path, engine) as (server, client):
        batch = create(client, item("a"), item("b"))
        server.wait_for(engine.holding)
    record = tmp_path / "batches" / f"{batch['id']}.json"
    fields = json.loads(record.read_bytes())
    fields["batch"] |= {"status": "cancelling", "cancelling_at": fields["batch"]["created_at"]}
    record.write_text(json.dumps(fields))
    with filing(tmp_path) as (server, client):
        go_on(server)
        done = ended(client, batch)
        assert done["request_counts"]["canceled"] == 2
        assert server.engine.requests == []


# ── refusals ──


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([], "between 1 and 3 requests"),
        ([item(str(n)) for n in range(4)], "between 1 and 3 requests; got 4"),
        ([item("a"), item("a")], "requests[1].custom_id a was given before"),
        ([item("")], "requests[0].custom_id must be 1 to 64 letters"),
        ([item("a b")], "requests[0].custom_id must be 1 to 64 letters"),
        ([item("a" * 65)], "requests[0].custom_id must be 1 to 64 letters"),
        ([item("a", stream=True)], "requests[0].params.stream must not be true"),
        ([{"custom_id": "a"}], "params"),
        ([{"custom_id": 5, "params": {}}], "custom_id"),
        ("none", "requests"),
    ],
)
def test_a_batch_that_cannot_be_is_refused_whole(tmp_path, requests, words):
    with filing(tmp_path, limits=RequestLimits(max_batch_requests=3)) as (server, client):
        answer = client.post(URL, json={"requests": requests})
        assert answer.status_code == 400
        body = answer.json()
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert words in body["error"]["message"]
        assert body["request_id"] == answer.headers["request-id"]
        assert client.get(URL).json()["data"] == []
        assert server.engine.requests == []
    assert list((tmp_path / "files").iterdir()) == []


def test_without_a_folder_the_answer_says_which_flag_is_missing():
    with running(FakeEngine(), ServerSettings()) as server, server.client() as client:
        for method, path in (
            ("POST", ""), ("GET", ""), ("GET", "/x"), ("DELETE", "/x"), ("POST", "/x/cancel"),
            ("GET", "/x/results"),
        ):  # fmt: skip
            answer = client.request(method, URL + path, json={"requests": [item("a")]})
            assert answer.status_code == 501, (method, path)
            assert "--files-dir" in answer.json()["error"]["message"]


def test_a_batch_that_runs_has_no_results_and_is_not_deleted(tmp_path):
    engine = FakeEngine(hold_after=0)
    with filing(tmp_path, engine) as (server, client):
        batch = create(client, item("a"))
        server.wait_for(engine.holding)
        for method, path in (("GET", "/results"), ("DELETE", "")):
            answer = client.request(method, f"{URL}/{batch['id']}{path}")
            assert answer.status_code == 400
            assert "has" in answer.json()["error"]["message"]
        assert retrieve(client, batch)["processing_status"] == "in_progress"


def test_an_unknown_batch_and_that_of_another_key_are_not_found(tmp_path):
    with filing(tmp_path, api_keys=("a", "b")) as (_, client):
        client.headers["x-api-key"] = "a"
        batch = create(client, item("q"))
        ended(client, batch)
        for key, id_ in (("b", batch["id"]), ("a", "msgbatch_none")):
            client.headers["x-api-key"] = key
            for method, path in (
                ("GET", ""), ("GET", "/results"), ("POST", "/cancel"), ("DELETE", ""),
            ):  # fmt: skip
                answer = client.request(method, f"{URL}/{id_}{path}")
                assert answer.status_code == 404
                assert answer.json()["error"]["type"] == "not_found_error"
        client.headers["x-api-key"] = "b"
        assert client.get(URL).json()["data"] == []
        client.headers.pop("x-api-key")
        assert client.get(URL).status_code == 401


def test_a_draining_server_takes_no_batch(tmp_path):
    with filing(tmp_path) as (server, client):
        server.call(server.service.start_draining)
        answer = client.post(URL, json={"requests": [item("a")]})
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")


def test_the_store_is_bounded(tmp_path):
    with filing(tmp_path, limits=RequestLimits(max_stored_file_bytes=50)) as (_, client):
        answer = client.post(URL, json={"requests": [item("a")]})
        assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")
    assert list((tmp_path / "files").iterdir()) == []


# ── beside OpenAI's ──


def test_neither_api_shows_the_batches_of_the_other(tmp_path):
    with filing(tmp_path) as (server, client):
        theirs = openai_over(server, client, begin(client, lines(question("a"))))
        ours = create(client, item("a"))
        ended(client, ours)
        assert [each["id"] for each in client.get("/v1/batches").json()["data"]] == [theirs["id"]]
        assert [each["id"] for each in client.get(URL).json()["data"]] == [ours["id"]]
        assert client.get(f"/v1/batches/{ours['id']}").status_code == 404
        assert client.get(f"{URL}/{theirs['id']}").status_code == 404
        listed = {each["id"] for each in client.get("/v1/files").json()["data"]}
        assert listed == {theirs["input_file_id"], theirs["output_file_id"]}
        hidden = [path.name for path in (tmp_path / "files").glob("file-*[0-9a-f]")
                  if path.suffix == "" and path.name not in listed]  # fmt: skip
        assert len(hidden) == 1
        assert client.get(f"/v1/files/{hidden[0]}/content").status_code == 404
        assert client.delete(f"/v1/files/{hidden[0]}").status_code == 404


def test_the_oldest_that_has_ended_makes_room_with_its_results(tmp_path):
    with filing(tmp_path, limits=RequestLimits(max_stored_batches=1)) as (_, client):
        first, second = create(client, item("a")), None
        ended(client, first)
        second = create(client, item("a"))
        done = ended(client, second)
        assert client.get(f"{URL}/{first['id']}").status_code == 404
        assert list(results(client, done)) == ["a"]
        assert len(list((tmp_path / "files").iterdir())) == 2  # one of results, and its record


def test_results_that_are_too_old_are_archived(tmp_path):
    with filing(tmp_path) as (server, client):
        batch = create(client, item("a"))
        done = ended(client, batch)
        assert server.service.batches is not None
        shelf = server.service.batches.shelf
        now = shelf.now()
        shelf.now = lambda: now + 29 * 24 * 3600 + 5
        late = retrieve(client, batch)
        assert (late["results_url"], late["archived_at"] is not None) == (None, True)
        assert client.get(done["results_url"]).status_code == 404


# ── pages ──


def test_lists_come_in_pages_newest_first(tmp_path):
    with filing(tmp_path) as (server, client), official(server.url) as sdk:
        ids: list[str] = []
        for n in range(5):
            batch = create(client, item(str(n)))
            ended(client, batch)
            ids.insert(0, batch["id"])

        def page(**query: Any) -> tuple[list[str], bool]:
            answer = client.get(URL, params=query).raise_for_status().json()
            found = [each["id"] for each in answer["data"]]
            edges = (found[0], found[-1]) if found else (None, None)
            assert (answer["first_id"], answer["last_id"]) == edges
            return found, answer["has_more"]

        assert page() == (ids, False)
        assert page(limit=2) == (ids[:2], True)
        assert page(limit=2, after_id=ids[1]) == (ids[2:4], True)
        assert page(limit=2, after_id=ids[3]) == (ids[4:], False)
        assert page(limit=2, before_id=ids[4]) == (ids[2:4], True)
        assert page(limit=2, before_id=ids[1]) == (ids[:1], False)
        assert page(after_id=ids[4]) == ([], False)
        assert [each.id for each in sdk.messages.batches.list(limit=2)] == ids
        for query in ("limit=0", "limit=1001", "limit=x", "after_id=none", "before_id=none"):
            answer = client.get(f"{URL}?{query}")
            assert answer.status_code == 400
            assert query.partition("=")[0] in answer.json()["error"]["message"]
