"""Requests in both shapes: real keys, and labels that say what an engine would find."""

import pytest

from octavo.study.shapes import ChatText, TokenIds
from octavo.study.workload import Arrival, tokens_of
from octavo_engine.protocol import route_keys
from octavo_router.residency import scan as slow_scan

LABEL_BYTES = 12


def arrival(*parts, answer=range(9000, 9020)):
    return Arrival(parts, answer, 0.0)


def labelled_tokens(labels):
    entries = labels.entries
    return {
        entries[at : at + 8]: int.from_bytes(entries[at + 8 : at + 12], "little")
        for at in range(0, len(entries), LABEL_BYTES)
    }


@pytest.mark.parametrize("lengths", [(5,), (16,), (512, 512, 100), (10, 3, 30, 1, 70), (15, 1)])
def test_keys_of_ids_are_those_of_the_whole_prompt(lengths):
    parts, start = [], 100
    for length in lengths:
        parts.append(range(start, start + length))
        start += 1000
    shape = TokenIds()
    expected = route_keys.keys_of({"prompt": tokens_of(tuple(parts))}, "completion")

    for _ in range(2):  # made, then remembered
        prepared = shape.prepare(arrival(*parts))
        assert prepared.request.keys == route_keys.pack_keys(expected)
        assert prepared.request.prompt_tokens == len(prepared.tokens) == sum(lengths)


def test_answers_of_ids_are_labelled_like_prompts():
    shape = TokenIds()
    prompt, answer = range(100), range(9000, 9028)
    labels = shape.prepare(arrival(prompt, answer=answer)).answer_labels()
    following = shape.prepare(arrival(prompt, answer, range(500, 600))).request.keys

    assert labels is not None
    tokens = labelled_tokens(labels)
    assert tokens[following[56:64]] == 128  # eight blocks of prompt and answer
    assert len(tokens) == 8


def test_a_chat_that_begins_like_another_shares_its_keys_and_tokens():
    shape = ChatText(slow_scan.scan)
    system = range(1000, 1160)
    first = shape.prepare(arrival(system, range(2000, 2100)))
    second = shape.prepare(arrival(system, range(3000, 3100)))

    assert first.tokens[4:170] != second.tokens[4:170]
    shared = first.request.keys[: 8 * 10]  # the opening, and chunks within 160 tokens
    assert second.request.keys.startswith(shared)
    assert first.request.keys[8 * 14 :] != second.request.keys[8 * 14 :]
    assert first.request.prompt_tokens == 0  # the router has to guess
    assert 260 * 4 <= first.request.prompt_bytes < 261 * 4 + 16  # with the message's role

    labels = first.labels()
    assert labels is not None
    lead = len(first.tokens) - 260 - len(ChatText._AFTER) // 4
    found = labelled_tokens(labels)[shared[-8:]]
    assert abs(found - (lead + 9 * 16)) <= 16


def test_a_text_cut_short_begins_like_the_whole():
    shape = ChatText(slow_scan.scan)
    whole = shape.prepare(arrival(range(512))).request.keys
    part = shape.prepare(arrival(range(512)[:200])).request.keys

    assert whole.startswith(part)
