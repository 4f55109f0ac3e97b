"""thinking_token_budget: thoughts end when their tokens are used up."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from octavo_engine.server.settings import ServerSettings
from tests.fakes.simulated import simulating
from tests.fakes.talking import HERMES, HI, saying


def grammar_for(using: ServerSettings, **requested: Any) -> Any:
    with saying("Hello.", using=using) as (server, client):
        client.chat.completions.create(model="fake", messages=HI, extra_body=requested)
        return server.engine.requests[-1][1].grammar


def test_a_budget_for_thoughts_goes_along_with_what_the_answer_must_be():
    opened = ServerSettings(reasoning_parser="deepseek_r1")
    alone = grammar_for(opened, thinking_token_budget=5)
    assert (alone.after, alone.budget, alone.opens) == ("</think>", 5, ())

    both = grammar_for(
        opened, thinking_token_budget=0, structured_outputs={"choice": ["yes", "no"]}
    )
    assert (both.kind, both.after, both.budget) == ("choice", "</think>", 0)

    by_itself = grammar_for(HERMES, thinking_token_budget=5)
    assert (by_itself.budget, by_itself.opens) == (5, ("<think>",))
    assert grammar_for(HERMES, thinking_token_budget=-1) is None


def test_a_budget_needs_thoughts_that_can_be_told():
    with pytest.raises(openai.BadRequestError, match="--reasoning-parser"):
        grammar_for(ServerSettings(), thinking_token_budget=5)


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_end_when_their_tokens_are_used_up(stream):
    """Bytes are tokens there, so the mark takes eight of them."""
    using = ServerSettings(reasoning_parser="deepseek_r1")
    with (
        simulating(settings=using) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        requested: Any = {"max_tokens": 30, "extra_body": {"thinking_token_budget": 5}, "n": 2}
        if stream:
            requested |= {"stream": True, "stream_options": {"include_usage": True}}
        answer = client.chat.completions.create(model="sim", messages=HI, **requested)
        usage = list(answer)[-1].usage if stream else answer.usage
        server.check_idle()
    assert usage.completion_tokens == 2 * (5 + len("</think>") + 1)  # the simulator ends soon
    assert usage.completion_tokens_details.reasoning_tokens == 2 * (5 + len("</think>"))
