"""The official client against a real server process, with the simulator behind it."""

from __future__ import annotations

import openai
import pytest

from tests.fakes.openai_checks import check_completion_whole_and_streamed
from tests.fakes.process import serving

HI = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client():
    flags = ("--served-model-name", "sim", "--api-key", "secret", "--max-model-len", "512")
    with (
        serving("m", *flags, "--sim-time-scale", "0.1") as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0) as client,
    ):
        yield client


def test_the_model_is_listed(client):
    assert [model.id for model in client.models.list()] == ["sim"]
    assert client.models.retrieve("sim").owned_by == "octavo"


def test_a_completion_whole_and_streamed_is_the_same(client):
    check_completion_whole_and_streamed(client)


def test_a_chat_whole_and_streamed_is_the_same(client):
    requested = {"model": "sim", "messages": HI, "max_completion_tokens": 10, "seed": 4, "n": 2}
    whole = client.chat.completions.create(**requested)
    texts = ["", ""]
    roles = []
    for event in client.chat.completions.create(**requested, stream=True):
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            roles += [choice.delta.role] if choice.delta.role else []

    assert texts == [choice.message.content for choice in whole.choices]
    assert roles == ["assistant", "assistant"]
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 20


def test_an_equal_prompt_is_found_in_the_cache(client):
    prompt = "the same words again and again " * 8
    first, second = (
        client.completions.create(model="sim", prompt=prompt, max_tokens=2) for _ in range(2)
    )

    # The one token that begins every prompt may have been seen before.
    assert first.usage.prompt_tokens_details.cached_tokens <= 1
    assert second.usage.prompt_tokens_details.cached_tokens > 200


def test_token_ids_are_a_prompt_too(client):
    answer = client.completions.create(model="sim", prompt=[5, 6, 7], max_tokens=3)
    assert answer.usage.prompt_tokens == 3


@pytest.mark.parametrize(
    ("error", "param", "requested"),
    [
        (openai.NotFoundError, "model", {"model": "other"}),
        (openai.BadRequestError, "temperature", {"temperature": -1}),
        (openai.BadRequestError, "n", {"n": 10**6}),
        (openai.BadRequestError, "max_tokens", {"max_tokens": 100_000}),
        (openai.BadRequestError, "messages", {"messages": []}),
        (
            openai.BadRequestError,
            "messages",
            {"messages": [{"role": "user", "content": "a" * 600}]},
        ),
        (openai.BadRequestError, "response_format", {"response_format": {"type": "yaml"}}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_raised_as_the_client_knows_them(client, error, param, requested, stream):
    with pytest.raises(error) as raised:
        client.chat.completions.create(
            **{"model": "sim", "messages": HI, "stream": stream, **requested}
        )

    assert raised.value.param == param
    assert raised.value.request_id


def test_a_wrong_key_is_an_authentication_error(client):
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_leaving_a_stream_early_lets_the_next_one_in(client):
    with client.completions.create(
        model="sim", prompt="x", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    ) as events:
        next(iter(events))
    answer = client.completions.create(model="sim", prompt="y", max_tokens=1)
    assert answer.choices[0].finish_reason == "length"
