"""Batches over the API: their answers, their errors, and their end in every way there is."""

from __future__ import annotations

import asyncio
import errno
import json
import time
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from octavo_engine.server.http.errors import NO_SPACE
from octavo_engine.server.limits import RequestLimits
from octavo_engine.server.openai.batches.runner import BatchRunner
from octavo_engine.server.openai.batches.shapes import BatchObject
from octavo_engine.server.openai.batches.shelf import BatchRecord, FileStore, new_file_id
from octavo_engine.server.openai.batches.storage import Storage
from octavo_engine.state.request import BACKGROUND
from tests.engine.server.batches.filing import (
    URL,
    begin,
    content,
    filing,
    lines,
    over,
    question,
    upload,
)
from tests.fakes.engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from starlette.types import Receive, Scope, Send


class FullDisk(Storage):
    """Nothing more can be written."""

    def append(self, path: Path) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    write = append


def test_a_batch_answers_as_the_endpoint_does(tmp_path):
    requested = [question("a"), question("b", prompt="bb"), question("c", max_tokens=0)]
    with filing(tmp_path) as (server, client):
        batch = begin(client, lines(*requested), metadata={"for": "test"})
        assert (batch["object"], batch["status"]) == ("batch", "validating")
        done = over(server, client, batch)

        assert (done["status"], done["metadata"]) == ("completed", {"for": "test"})
        assert done["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        times = [
            done[f"{name}_at"] for name in ("created", "in_progress", "finalizing", "completed")
        ]
        assert times == sorted(times)
        good = content(client, done["output_file_id"])
        assert [answer["custom_id"] for answer in good] == ["a", "b"]
        for answer, question_ in zip(good, requested, strict=False):
            direct = client.post(URL, json=question_["body"]).json()
            assert answer["response"]["status_code"] == 200
            assert answer["response"]["body"]["choices"] == direct["choices"]
        (bad,) = content(client, done["error_file_id"])
        assert (bad["custom_id"], bad["response"]["status_code"]) == ("c", 400)
        assert bad["response"]["body"]["error"]["param"] == "max_tokens"

        assert client.get("/v1/batches").json()["data"] == [done]
        listed = client.get("/v1/files?purpose=batch_output&order=asc").json()["data"]
        assert [file["id"] for file in listed] == [done["output_file_id"], done["error_file_id"]]
        assert client.post(f"/v1/batches/{batch['id']}/cancel").json() == done  # it is over
    left = {path.suffix for path in (tmp_path / "batches").iterdir()}
    assert left == {".json"}


def test_a_batch_runs_in_the_background_and_no_client_can(tmp_path):
    with filing(tmp_path) as (server, client):
        over(server, client, begin(client, lines(question("a"))))
        client.post(URL, json=question("b")["body"])
        requested = question("c")["body"] | {"priority": BACKGROUND}
        assert client.post(URL, json=requested).status_code == 400
        priorities = [requested["priority"] for _, _, requested in server.engine.requests]
    assert priorities == [BACKGROUND, 0]


def test_a_batch_asks_for_no_key_of_its_own(tmp_path):
    """Its maker was asked; the inner requests have none to show, and outsiders no such way in."""
    with filing(tmp_path, api_keys=("k",)) as (server, client):
        client.headers["authorization"] = "Bearer k"
        done = over(server, client, begin(client, lines(question("a"))))
        assert done["request_counts"]["completed"] == 1
        client.headers.pop("authorization")
        assert client.post(URL, json=question("a")["body"]).status_code == 401


def test_a_batch_belongs_to_the_key_that_made_it(tmp_path):
    with filing(tmp_path, api_keys=("a", "b")) as (_, client):
        client.headers["authorization"] = "Bearer a"
        batch = begin(client, lines(question("q")))
        client.headers["authorization"] = "Bearer b"
        assert client.get("/v1/batches").json()["data"] == []
        for method, path in (("GET", ""), ("POST", "/cancel")):
            answer = client.request(method, f"/v1/batches/{batch['id']}{path}")
            assert answer.json()["error"]["code"] == "batch_not_found"
        theirs = {"input_file_id": batch["input_file_id"], "endpoint": URL}
        answer = client.post("/v1/batches", json=theirs)
        assert answer.json()["error"]["code"] == "file_not_found"


@pytest.mark.parametrize(
    ("text", "code", "line", "words"),
    [
        (b"", "empty_file", None, "no requests"),
        (b"\n \n", "empty_file", None, "no requests"),
        (lines(question("a")) + b"{", "invalid_line", 2, "not valid JSON"),
        (lines(question("a"), question("a")), "invalid_line", 2, "given before"),
        (lines(question("a", url="/v1/chat/completions")), "invalid_line", 1, "batch's endpoint"),
        (lines(question("a", stream=True)), "invalid_line", 1, "stream"),
        (lines(*(question(str(n)) for n in range(6))), "too_many_requests", None, "6 requests; 5"),
    ],
)
def test_a_file_with_a_fault_fails_whole_and_says_where(tmp_path, text, code, line, words):
    engine = FakeEngine()
    limits = RequestLimits(max_batch_requests=5)
    with filing(tmp_path, engine, limits=limits) as (server, client):
        failed = over(server, client, begin(client, text))
    assert failed["status"] == "failed"
    assert failed["failed_at"] is not None
    (error,) = failed["errors"]["data"]
    assert (error["code"], error["line"]) == (code, line)
    assert words in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/files"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "200h"}, "completion_window"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"a": "b" * 600}}, "metadata"),
        ({"metadata": {"a": 5}}, "metadata[...]"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}},
         "output_expires_after.seconds"),
        ({"input_file_id": "file-none"}, "file_id"),
        ({"input_file_id": None}, "input_file_id"),
    ],
)  # fmt: skip
def test_a_batch_that_cannot_be_names_the_field(tmp_path, change, param):
    with filing(tmp_path) as (_, client):
        id_ = upload(client, lines(question("a"))).json()["id"]
        answer = client.post("/v1/batches", json={"input_file_id": id_, "endpoint": URL} | change)
        assert answer.status_code in (400, 404)
        assert answer.json()["error"]["param"] == param
        assert client.get("/v1/batches").json()["data"] == []


def test_what_a_batch_made_is_no_input(tmp_path):
    with filing(tmp_path) as (server, client):
        done = over(server, client, begin(client, lines(question("a"))))
        body = {"input_file_id": done["output_file_id"], "endpoint": URL}
        answer = client.post("/v1/batches", json=body)
        assert answer.json()["error"]["param"] == "input_file_id"


def test_a_cancelled_batch_keeps_what_it_has_and_frees_what_runs(tmp_path):
    engine = FakeEngine(hold_after=2)
    requested = lines(
        question("short", max_tokens=1), question("long", max_tokens=9), question("late")
    )
    with filing(tmp_path, engine, batch_concurrency=1) as (server, client):
        batch = begin(client, requested)
        server.wait_for(engine.holding)
        cancelled = client.post(f"/v1/batches/{batch['id']}/cancel").json()
        assert cancelled["status"] == "cancelling"
        done = over(server, client, batch)
        assert (done["status"], done["error_file_id"]) == ("cancelled", None)
        assert done["request_counts"] == {"total": 3, "completed": 1, "failed": 0}
        assert [a["custom_id"] for a in content(client, done["output_file_id"])] == ["short"]
        server.wait_until_idle()
        assert len(engine.aborted) == 1
        assert client.post(f"/v1/batches/{batch['id']}/cancel").json() == done


def test_the_input_may_be_deleted_while_it_is_read(tmp_path):
    engine = FakeEngine(hold_after=0)
    with filing(tmp_path, engine, batch_concurrency=1) as (server, client):
        batch = begin(client, lines(question("a"), question("b")))
        server.wait_for(engine.holding)
        client.delete(f"/v1/files/{batch['input_file_id']}").raise_for_status()
        engine.hold_after = None
        server.call(engine.release.set)
        assert over(server, client, batch)["request_counts"]["completed"] == 2


def test_batches_share_their_places_with_each_other_and_leave_the_rest_to_others(tmp_path):
    engine = FakeEngine(hold_after=0)
    with filing(tmp_path, engine, batch_concurrency=2) as (server, client):
        first = begin(client, lines(*(question(str(n)) for n in range(5))))
        second = begin(client, lines(*(question(str(n)) for n in range(5))))
        server.wait_for(engine.holding)
        assert server.service.admission.in_flight <= 2
        engine.hold_after = None
        server.call(engine.release.set)
        for batch in (first, second):
            assert over(server, client, batch)["request_counts"]["completed"] == 5


def test_a_draining_server_takes_no_batch(tmp_path):
    with filing(tmp_path) as (server, client):
        id_ = upload(client, lines(question("a"))).json()["id"]
        server.call(server.service.start_draining)
        answer = client.post("/v1/batches", json={"input_file_id": id_, "endpoint": URL})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")


def test_lists_come_in_pages_newest_first(tmp_path):
    with filing(tmp_path) as (server, client):
        ids = []
        for n in range(3):
            batch = begin(client, lines(question(str(n))))
            over(server, client, batch)
            ids.append(batch["id"])
        page = client.get("/v1/batches?limit=2").json()
        assert ([batch["id"] for batch in page["data"]], page["has_more"]) == (ids[:0:-1], True)
        rest = client.get("/v1/batches", params={"after": page["last_id"]}).json()
        assert ([batch["id"] for batch in rest["data"]], rest["has_more"]) == (ids[:1], False)
        assert client.get("/v1/batches?limit=101").status_code == 400


# ── restarts and clocks ──


class App:
    """Answers with the prompt; from the request named `stop_at` on it never does."""

    def __init__(self, stop_at: str = "") -> None:
        self.requested: list[str] = []
        self.stuck = asyncio.Event()
        self._stop_at = stop_at

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        prompt = json.loads((await receive())["body"])["prompt"]
        self.requested.append(prompt)
        if prompt == self._stop_at:
            self.stuck.set()
            await asyncio.Event().wait()
        status = 400 if prompt == "bad" else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(prompt).encode()})


def shelf_with_batch(
    folder: Path, prompts: list[str], now: Callable[[], float] = time.time
) -> tuple[FileStore, BatchRecord]:
    shelf = FileStore(str(folder), RequestLimits(), now)
    path = shelf.upload_path()
    path.write_bytes(lines(*(question(prompt, prompt=prompt) for prompt in prompts)))
    file = shelf.keep(
        path, file_id=new_file_id(), name="in", purpose="batch", owner="", keeps_s=None
    )
    at = int(now())
    batch = BatchObject(id="batch_1", endpoint=URL, input_file_id=file.id, completion_window="1h",
                  created_at=at, expires_at=at + 3600)  # fmt: skip
    record = BatchRecord(batch=batch, owner="", keeps_s=None)
    shelf.begin(record)
    return shelf, record


def batches_of(shelf: FileStore, app: App) -> BatchRunner:
    return BatchRunner(shelf, app, RequestLimits(), concurrency=1)


async def ended(batches: BatchRunner) -> None:
    for task in list(batches._tasks.values()):
        await asyncio.wait([task])
    await asyncio.sleep(0)  # for what hears of it


def answers(shelf: FileStore, file_id: str | None) -> list[Any]:
    assert file_id is not None
    return [json.loads(line) for line in shelf.content_path(file_id).read_bytes().splitlines()]


def test_a_restart_asks_only_what_has_no_answer(tmp_path):
    async def first() -> None:
        shelf, _ = shelf_with_batch(tmp_path, ["a", "bad", "c", "d"])
        app = App(stop_at="c")
        batches = batches_of(shelf, app)
        batches.start()
        await app.stuck.wait()
        await batches.stop()

    async def second() -> None:
        with (tmp_path / "batches" / "batch_1.output").open("ab") as output:
            output.write(b'{"custom_id": "c", "resp')  # as if it had died in the midst of a line
        shelf, app = FileStore(str(tmp_path), RequestLimits()), App()
        batches = batches_of(shelf, app)
        batches.start()
        await ended(batches)
        batch = shelf.batches["batch_1"].batch
        assert app.requested == ["c", "d"]
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == (
            "completed", 3, 1,
        )  # fmt: skip
        assert [a["custom_id"] for a in answers(shelf, batch.output_file_id)] == ["a", "c", "d"]
        assert [a["custom_id"] for a in answers(shelf, batch.error_file_id)] == ["bad"]
        await batches.stop()

    asyncio.run(first())
    asyncio.run(second())


def test_a_cancel_counts_even_where_the_server_ends_first(tmp_path):
    async def story() -> None:
        shelf, record = shelf_with_batch(tmp_path, ["a"])
        record.batch.status = "cancelling"
        shelf.save(record)
        shelf.close()
        shelf, app = FileStore(str(tmp_path), RequestLimits()), App()
        batches = batches_of(shelf, app)
        batches.start()
        assert (shelf.batches["batch_1"].batch.status, app.requested) == ("cancelled", [])
        await batches.stop()

    asyncio.run(story())


def test_a_cancel_in_the_same_moment_as_the_beginning_counts(tmp_path):
    async def story() -> None:
        shelf, record = shelf_with_batch(tmp_path, ["a"])
        app = App()
        batches = batches_of(shelf, app)
        batches.start()
        batches.cancel(record)
        await ended(batches)
        assert (record.batch.status, app.requested) == ("cancelled", [])
        assert record.batch.output_file_id is None
        await batches.stop()

    asyncio.run(story())


@pytest.mark.parametrize("moved", [True, False])
def test_a_crash_while_answers_become_files_loses_none(tmp_path, moved):
    async def story() -> None:
        shelf, record = shelf_with_batch(tmp_path, ["a"])
        batch = record.batch
        batch.status, batch.output_file_id = "finalizing", new_file_id()
        output = shelf.work_path(batch, "output")
        output.write_bytes(b'{"custom_id":"a"}\n')
        shelf.save(record)
        if moved:
            shelf.keep(output, file_id=batch.output_file_id, name="o", purpose="batch_output",
                       owner="", keeps_s=None)  # fmt: skip
        shelf.close()
        shelf, app = FileStore(str(tmp_path), RequestLimits()), App()
        batches = batches_of(shelf, app)
        batches.start()
        await ended(batches)
        batch = shelf.batches["batch_1"].batch
        assert (batch.status, app.requested) == ("completed", [])
        assert [a["custom_id"] for a in answers(shelf, batch.output_file_id)] == ["a"]
        await batches.stop()

    asyncio.run(story())


def test_a_batch_that_is_too_late_says_which_requests_were_not_answered(tmp_path):
    now = [1000.0]

    async def story() -> None:
        shelf, _record = shelf_with_batch(tmp_path, ["a", "b", "c"], now=lambda: now[0])
        app = App(stop_at="b")
        batches = batches_of(shelf, app)
        batches.start()
        await app.stuck.wait()
        await batches.stop()
        now[0] += 3600
        shelf = FileStore(str(tmp_path), RequestLimits(), now=lambda: now[0])
        batches = batches_of(shelf, App(stop_at="b"))
        batches.start()
        await ended(batches)
        batch = shelf.batches["batch_1"].batch
        assert (batch.status, batch.expired_at) == ("expired", 4600)
        assert batch.request_counts.failed == 2
        late = answers(shelf, batch.error_file_id)
        assert [(a["custom_id"], a["error"]["code"]) for a in late] == [
            ("b", "batch_expired"), ("c", "batch_expired"),
        ]  # fmt: skip
        assert [a["custom_id"] for a in answers(shelf, batch.output_file_id)] == ["a"]
        await batches.stop()

    asyncio.run(story())


def test_a_batch_whose_input_is_gone_fails_and_harms_nobody(tmp_path, caplog):
    async def story() -> None:
        shelf, record = shelf_with_batch(tmp_path, ["a"])
        shelf.work_path(record.batch, "input").unlink()
        batches = batches_of(shelf, App())
        batches.start()
        await ended(batches)
        assert record.batch.status == "failed"
        assert record.batch.errors is not None
        assert record.batch.errors.data[0].code == "internal_error"
        await batches.stop()

    asyncio.run(story())
    assert "A batch failed" in caplog.text and "Traceback" not in caplog.text


def test_a_batch_on_a_full_disk_fails_with_a_sentence_and_makes_room(tmp_path, caplog):
    async def story() -> None:
        shelf, record = shelf_with_batch(tmp_path, ["a"])
        shelf.storage = FullDisk()
        batches = batches_of(shelf, App())
        batches.start()
        await ended(batches)
        assert record.batch.status == "failed"
        assert record.batch.errors is not None
        (error,) = record.batch.errors.data
        assert (error.code, error.message) == ("disk_full", NO_SPACE)
        assert not shelf.work_path(record.batch, "input").exists()
        await batches.stop()

    asyncio.run(story())
    said = [record.__dict__["error"] for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 2 and all("No space left on device" in error for error in said)
    assert "Traceback" not in caplog.text


def test_the_oldest_batches_that_are_over_are_forgotten(tmp_path):
    limits = RequestLimits(max_stored_batches=2)
    with filing(tmp_path, limits=limits) as (server, client):
        ids = []
        for n in range(3):
            batch = begin(client, lines(question(str(n))))
            over(server, client, batch)
            ids.append(batch["id"])
        assert [b["id"] for b in client.get("/v1/batches").json()["data"]] == ids[:0:-1]
    with filing(tmp_path, FakeEngine(hold_after=0), limits=limits) as (server, client):
        for n in range(2):
            begin(client, lines(question(str(n))))
        id_ = upload(client, lines(question("a"))).json()["id"]
        answer = client.post("/v1/batches", json={"input_file_id": id_, "endpoint": URL})
        assert "2 batches run already" in answer.json()["error"]["message"]
