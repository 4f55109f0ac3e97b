"""An answer's parts are the same however its news is cut, and the steps add up to them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_engine.core.text.logprobs import DecodedLogprobs
from octavo_engine.dialects.events import Arguments, CallBegun, Content, Event, Reasoning
from octavo_engine.server.openai.chat.parts import (
    ChatPart,
    ChatParts,
    PartDelta,
    PartEnded,
    PartStarted,
    Step,
)
from octavo_engine.server.openai.chat.session import ChatToken, ChoiceDelta

SAID: list[Event] = [
    Reasoning("Which "), Reasoning("city?"), Content("Let me "), Content("look."),
    CallBegun(0, "get_weather", "a"), Arguments(0, '{"city": '), Arguments(0, '"Oslo"}'),
    CallBegun(1, "get_time", "b"), Content("Done."),
]  # fmt: skip
PARTS = [
    ("reasoning", "Which city?", "", ""),
    ("text", "Let me look.", "", ""),
    ("call", '{"city": "Oslo"}', "get_weather", "a"),
    ("call", "", "get_time", "b"),
    ("text", "Done.", "", ""),
]


def seen(parts: ChatParts) -> list[tuple[str, str, str, str]]:
    return [(part.kind, part.text, part.name, part.call_id) for part in parts.parts]


def score(token: int) -> DecodedLogprobs:
    return DecodedLogprobs(token, chr(token), bytes([token]), -0.5, 1, [])


def read(cuts: set[int]) -> tuple[ChatParts, list[Step]]:
    parts, steps = ChatParts(), []
    news = ChoiceDelta(0)
    for number, event in enumerate(SAID):
        news.events.append(event)
        if number in cuts:
            steps += parts.read(news)
            news = ChoiceDelta(0)
    return parts, steps + parts.read(news) + parts.end()


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.sets(st.integers(0, len(SAID))))
def test_cuts_change_nothing(cuts):
    parts, steps = read(cuts)

    assert seen(parts) == PARTS
    reported: list[list[object]] = []
    for step in steps:
        match step:
            case PartStarted(part):
                reported.append([part.kind, "", "open"])
                assert part.index == len(reported) - 1
                assert all(entry[2] == "ended" for entry in reported[:-1])
            case PartDelta(part, text, _):
                reported[part.index][1] += text  # type: ignore[operator]  # it is text
            case PartEnded(part):
                reported[part.index][2] = "ended"
    assert reported == [[kind, text, "ended"] for kind, text, _, _ in PARTS]
    assert parts.has_calls


def test_plain_text_needs_no_events():
    parts = ChatParts()
    steps = parts.read(ChoiceDelta(0, content="Hel")) + parts.read(ChoiceDelta(0, content="lo"))

    assert [type(step) for step in steps] == [PartStarted, PartDelta, PartDelta]
    assert [type(step) for step in parts.end()] == [PartEnded]
    assert parts.end() == []
    assert seen(parts) == [("text", "Hello", "", "")]
    assert not parts.has_calls


def test_logprobs_go_with_texts_only_and_the_last_token_is_not_lost():
    parts = ChatParts()
    parts.read(ChoiceDelta(0, events=[ChatToken(score(104)), Reasoning("h")]))
    parts.read(ChoiceDelta(0, events=[ChatToken(score(195))]))  # half a letter
    (*_, more) = parts.read(ChoiceDelta(0, events=[ChatToken(score(164)), Content("ä")]))
    parts.read(ChoiceDelta(0, events=[ChatToken(score(0))]))
    last, ended = parts.end()

    assert isinstance(more, PartDelta)
    assert [entry.token_id for entry in more.logprobs] == [195, 164]
    assert isinstance(last, PartDelta)
    assert (last.text, [entry.token_id for entry in last.logprobs]) == ("", [0])
    assert ended == PartEnded(parts.parts[1])
    assert parts.parts[0].logprobs == []
    assert [entry.token_id for entry in parts.parts[1].logprobs] == [195, 164, 0]


def test_an_answer_of_nothing_has_no_parts_unless_one_is_wanted():
    parts = ChatParts()
    assert parts.read(ChoiceDelta(0, finish_reason="stop")) + parts.end() == []
    empty = ChatPart(0, "text")
    assert parts.nothing() == [PartStarted(empty), PartEnded(empty)]
