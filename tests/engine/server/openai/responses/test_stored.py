"""Responses that are kept: fetched, gone on from, made in the background, cancelled, forgotten."""

from __future__ import annotations

import time
from typing import Any

import httpx
import openai
import pytest

from octavo_engine.errors import GenerationFailed
from octavo_engine.server.limits import RequestLimits
from octavo_engine.server.settings import ServerSettings
from tests.engine.server.responses.test_answers import TOOLS, items, prompt_of
from tests.fakes.engine import FakeEngine
from tests.fakes.server import running
from tests.fakes.talking import OSLO, saying


def client_of(server: Any, key: str = "x") -> Any:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


def polled(client: Any, id_: str) -> Any:
    deadline = time.monotonic() + 10
    while (found := client.responses.retrieve(id_)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
    return found


@pytest.mark.slow
def test_a_response_is_fetched_as_it_was_given():
    with saying("Hi.") as (_, client):
        answer = client.responses.create(model="fake", input="a", metadata={"k": "v"})
        with client.responses.stream(model="fake", input="a") as stream:
            streamed = stream.get_final_response()
        assert client.responses.retrieve(answer.id) == answer
        assert client.responses.retrieve(streamed.id).output_text == "Hi."
        unkept = client.responses.create(model="fake", input="a", store=False)
        with pytest.raises(openai.NotFoundError) as missing:
            client.responses.retrieve(unkept.id)
    assert missing.value.code == "response_not_found"


def test_a_conversation_goes_on_without_being_sent_again():
    with saying(f"Let me look.\n{OSLO}") as (server, client):
        first = client.responses.create(
            model="fake", input="weather?", instructions="Be brief.", tools=TOOLS
        )
        result = {
            "type": "function_call_output", "call_id": first.output[1].call_id, "output": "rain"
        }  # fmt: skip
        server.engine.scripts[:] = ["It rains."]
        second = client.responses.create(
            model="fake", input=[result], previous_response_id=first.id, tools=TOOLS
        )
        third = client.responses.create(
            model="fake", input="thanks", previous_response_id=second.id, instructions="Be kind."
        )
        prompt = prompt_of(server)

    assert third.previous_response_id == second.id
    # The instructions are each request's own.
    assert prompt == (
        "<system>Be kind.\n<user>weather?\n<assistant>Let me look.\n<tool>rain\n"
        "<assistant>It rains.\n<user>thanks\n<assistant>"
    )


def test_an_error_in_what_came_before_names_it():
    with saying("Hi." * 50) as (server, client):
        first = client.responses.create(model="fake", input="a")
        server.engine.max_model_len = 100
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="fake", input="a", previous_response_id=first.id)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")


def test_input_items_are_listed_page_by_page():
    given: Any = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "three", "id": "fco_mine"},
        {"role": "user", "content": "four"},
    ]
    with saying("Hi.") as (server, client):
        answer = client.responses.create(model="fake", input=given)
        newest = client.responses.input_items.list(answer.id, limit=2)
        oldest = list(client.responses.input_items.list(answer.id, limit=2, order="asc"))
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.input_items.list(answer.id, after="nothing")
        with server.client() as raw:
            limits = [
                raw.get(f"/v1/responses/{answer.id}/input_items", params={"limit": limit})
                for limit in ("0", "101", "x")
            ]

    assert [item.type for item in newest.data] == ["message", "function_call_output"]
    assert newest.has_more and newest.data[1].id == "fco_mine"
    assert [item.type for item in oldest] == [  # the client asks for the further pages
        "message", "message", "function_call", "function_call_output", "message"
    ]  # fmt: skip
    assert oldest[0].content[0].to_dict() == {"type": "input_text", "text": "one"}
    assert oldest[1].content[0].to_dict() == {
        "type": "output_text", "text": "two", "annotations": []
    }  # fmt: skip
    assert refused.value.param == "after"
    assert [(a.status_code, a.json()["error"]["param"]) for a in limits] == [(400, "limit")] * 3


def test_a_deleted_response_is_gone():
    with saying("Hi.") as (server, client):
        answer = client.responses.create(model="fake", input="a")
        with server.client() as raw:
            reported = raw.delete(f"/v1/responses/{answer.id}").json()
        for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                call(answer.id)
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="fake", input="b", previous_response_id=answer.id)
    assert reported == {"id": answer.id, "object": "response", "deleted": True}
    assert refused.value.code == "previous_response_not_found"


def test_nobody_reads_what_was_asked_with_another_key():
    settings = ServerSettings(api_keys=("one", "two"))
    with running(settings=settings) as server, client_of(server, "one") as one:
        answer = one.responses.create(model="fake", input="a")
        with client_of(server, "two") as two:
            for call in (two.responses.retrieve, two.responses.delete):
                with pytest.raises(openai.NotFoundError):
                    call(answer.id)
            with pytest.raises(openai.BadRequestError):
                two.responses.create(model="fake", input="b", previous_response_id=answer.id)
        with server.client(headers={"x-api-key": "one"}) as same:  # the same key, sent otherwise
            assert same.get(f"/v1/responses/{answer.id}").status_code == 200
        with server.client() as nobody:
            assert nobody.get(f"/v1/responses/{answer.id}").status_code == 401


@pytest.mark.parametrize("keys", [(), ("router",)], ids=["no keys", "the router's key"])
def test_nobody_reads_what_another_tenant_of_a_router_asked(keys: tuple[str, ...]):
    key = {"authorization": "Bearer router"}
    with (
        running(settings=ServerSettings(api_keys=keys)) as server,
        server.client(headers=key | {"x-octavo-owner": "a"}) as one,
    ):
        requested = {"model": "fake", "input": "a"}
        path = f"/v1/responses/{one.post('/v1/responses', json=requested).json()['id']}"
        for other in ({"x-octavo-owner": "b"}, {}):
            with server.client(headers=key | other) as another:
                assert another.get(path).status_code == 404
                assert another.delete(path).status_code == 404
        assert one.get(path).status_code == 200


# ── in the background ──


def test_a_response_in_the_background_is_polled():
    with saying("Hi.") as (server, client):
        queued = client.responses.create(model="fake", input="a", background=True)
        done = polled(client, queued.id)
        server.wait_until_idle()
        again = client.responses.cancel(queued.id)

    assert (queued.status, queued.output, queued.background) == ("queued", [], True)
    assert (done.status, done.output_text, done.id) == ("completed", "Hi.", queued.id)
    assert again == done


def test_one_that_fails_says_why():
    engine = FakeEngine(error=GenerationFailed("broken numbers"))
    with running(engine) as server, client_of(server) as client:
        queued = client.responses.create(model="fake", input="a", background=True)
        failed = polled(client, queued.id)
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="fake", input="b", previous_response_id=queued.id)
    assert failed.status == "failed"
    assert (failed.error.code, failed.error.message) == ("model_error", "broken numbers")
    assert "failed" in refused.value.message


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_one_that_runs_can_be_ended(how):
    engine = FakeEngine(hold_after=1)
    with running(engine) as server, client_of(server) as client:
        queued = client.responses.create(model="fake", input="a", background=True)
        server.wait_for(engine.holding)
        running_ = client.responses.retrieve(queued.id)
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="fake", input="b", previous_response_id=queued.id)
        ended = getattr(client.responses, how)(queued.id)
        server.wait_until_idle()
        if how == "cancel":
            assert client.responses.retrieve(queued.id) == ended
            assert (ended.status, ended.output) == ("cancelled", [])

    assert running_.status == "in_progress"
    assert "in_progress" in refused.value.message
    assert len(engine.aborted) == 1


def test_a_response_in_the_background_is_streamed_and_read_again_from_any_event():
    with saying("Hello there.") as (server, client):
        events = list(
            client.responses.create(model="fake", input="a", background=True, stream=True)
        )
        server.wait_until_idle()
        id_ = events[0].response.id
        again = list(client.responses.retrieve(id_, stream=True))
        rest = list(client.responses.retrieve(id_, stream=True, starting_after=3))
        none = list(client.responses.retrieve(id_, stream=True, starting_after=1000))
        whole = client.responses.retrieve(id_)

    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == whole.output_text == "Hello there."
    assert (again, rest, none) == (events, events[4:], [])


def test_a_client_that_leaves_a_background_stream_can_go_on_reading():
    engine = FakeEngine(hold_after=2)
    with running(engine) as server, client_of(server) as client:
        with client.responses.create(
            model="fake", input="a", background=True, stream=True
        ) as stream:
            first = next(iter(stream))
            id_ = first.response.id
            server.wait_for(engine.holding)
        running_ = client.responses.retrieve(id_)
        client.responses.cancel(id_)
        events = list(client.responses.retrieve(id_, stream=True, starting_after=0))
        server.wait_until_idle()

    assert running_.status == "in_progress" and len(engine.aborted) == 1
    assert events[0].sequence_number == 1
    assert events[-1].response.status == "cancelled"


@pytest.mark.parametrize(
    ("made", "query", "param"),
    [
        ({}, "?stream=true", "stream"),
        ({"background": True}, "?stream=true", "stream"),
        ({"background": True, "stream": True}, "?stream=true&starting_after=-1", "starting_after"),
        ({}, "?starting_after=1", "starting_after"),
    ],
)
def test_events_that_were_not_kept_are_refused(made, query, param):
    with saying("Hi.") as (server, client):
        requested = client.responses.create(model="fake", input="a", **made)
        id_ = next(iter(requested)).response.id if made.get("stream") else requested.id
        server.wait_until_idle()
        answer = httpx.get(f"{server.url}/v1/responses/{id_}{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_the_tokens_of_an_input_are_those_that_it_is_billed():
    with saying("Hi.", "Ho.") as (_, client):
        requested = {"model": "fake", "instructions": "Be brief.", "input": "Say hi."}
        counted = client.responses.input_tokens.count(**requested)
        first = client.responses.create(**requested)
        after = {"model": "fake", "input": "Again.", "previous_response_id": first.id}
        counted_after = client.responses.input_tokens.count(**after)
        second = client.responses.create(**after)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == first.usage.input_tokens
    assert counted_after.input_tokens == second.usage.input_tokens > first.usage.input_tokens


def test_what_was_not_in_the_background_cannot_be_cancelled():
    with saying("Hi.") as (_, client):
        answer = client.responses.create(model="fake", input="a")
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.cancel(answer.id)
    assert refused.value.param == "response_id"


def test_a_server_that_drains_waits_for_it():
    engine = FakeEngine(hold_after=1)
    with running(engine) as server, client_of(server) as client:
        queued = client.responses.create(model="fake", input="a", background=True)
        server.wait_for(engine.holding)
        assert server.service.admission.in_flight == 1
        server.call(engine.release.set)
        server.wait_until_idle()
        assert client.responses.retrieve(queued.id).status == "completed"


def test_too_large_to_keep_is_answered_all_the_same():
    settings = ServerSettings(limits=RequestLimits(max_stored_response_bytes=2000))
    with saying("Hi.", using=settings) as (server, client):
        kept = client.responses.create(model="fake", input="a")
        big = client.responses.create(model="fake", input="a" * 2000)
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="fake", input="a" * 2000, background=True)
        assert len(server.service.responses) == 1
    assert (kept.store, big.store) == (True, False)
    assert items(big.output) == [("text", "Hi.", "completed")]
    assert "--max-stored-response-bytes" in refused.value.message


@pytest.mark.parametrize(
    ("place", "begin"), [("0123abcd", "resp_0123abcd"), ("0123ABCD", ""), ("x" * 8, ""), ("0", "")]
)
def test_a_router_finds_the_engine_by_the_id(place, begin):
    with saying("Hi.") as (server, _), server.client(headers={"x-octavo-place": place}) as client:
        id_ = client.post("/v1/responses", json={"input": "a"}).json()["id"]
        assert client.get(f"/v1/responses/{id_}").status_code == 200
    assert len(id_) == len("resp_") + (8 if begin else 0) + 48
    assert id_.startswith(begin or "resp_")
