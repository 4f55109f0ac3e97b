"""The official client against a router in front of real engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.fakes.openai_checks import check_completion_whole_and_streamed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.router.conftest import Platform

pytestmark = pytest.mark.slow

HI: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(platform: Platform) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=platform.router.url + "/v1", api_key="any", max_retries=0
    ) as client:
        yield client


def test_the_model_is_listed_once_however_many_engines_serve_it(client):
    assert [model.id for model in client.models.list()] == ["sim"]
    assert client.models.retrieve("sim").id == "sim"
    with pytest.raises(openai.NotFoundError) as failed:
        client.models.retrieve("other")
    assert failed.value.code == "model_not_found"


def test_a_completion_whole_and_streamed_is_the_same(client):
    check_completion_whole_and_streamed(client)


def test_a_chat_whole_and_streamed_is_the_same(client):
    requested = {"model": "sim", "messages": HI, "max_completion_tokens": 10, "seed": 4, "n": 2}
    whole = client.chat.completions.create(**requested)
    texts = ["", ""]
    for event in client.chat.completions.create(**requested, stream=True):
        assert event.usage is None  # it was not asked for, though the router learns it
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""

    assert texts == [choice.message.content for choice in whole.choices]
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 20


def test_a_stream_that_is_left_early_is_closed(client, platform):
    with client.chat.completions.create(
        model="sim", messages=HI, max_tokens=500, stream=True
    ) as events:
        next(iter(events))
    platform.router.until(lambda: platform.router.metric("octavo_router_requests_running") == 0.0)


@pytest.mark.parametrize(
    ("error", "code", "requested"),
    [
        (openai.NotFoundError, "model_not_found", {"model": "other"}),
        (openai.BadRequestError, None, {"temperature": -1}),  # as the engine says it
        (openai.BadRequestError, "context_length_exceeded", {"max_tokens": 100_000}),
    ],
)
def test_errors_are_the_types_that_clients_handle(client, error, code, requested):
    with pytest.raises(error) as failed:
        client.chat.completions.create(**{"model": "sim", "messages": HI, **requested})
    assert failed.value.request_id
    if code is not None:
        assert failed.value.code == code


def test_a_wrong_key_is_an_authentication_error(platform):
    with platform.another_router("--api-key", "secret") as router:
        url = router.url + "/v1"
        with (
            openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.chat.completions.create(model="sim", messages=HI)
        with openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as client:
            answer = client.chat.completions.create(model="sim", messages=HI, max_tokens=2)
            assert answer.usage is not None and answer.usage.completion_tokens == 2
