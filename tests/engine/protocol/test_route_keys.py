"""Route keys: what they name, what they leave out, and the values that all versions must keep."""

import json
import struct
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_engine.protocol.route_keys import (
    CHUNK_BYTES,
    VERSION,
    Kind,
    Span,
    canonical,
    chain,
    continuation,
    keys_of,
    lookup_keys,
    opening,
    pack_keys,
    pack_value,
    unpack_keys,
)

SYSTEM = "You are a careful assistant who answers in one short sentence, always."
QUESTION = "Why is the sky blue, and why is it red in the evening? Explain it to a child."


def chat(*messages, **fields):
    return {"model": "m", "messages": list(messages), **fields}


def user(content, **fields):
    return {"role": "user", "content": content, **fields}


def system(content):
    return {"role": "system", "content": content}


def assistant(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def reduced(body, kind="chat", adapter=""):
    result = canonical(body, kind=kind, adapter=adapter)
    assert result is not None
    return result


# ── the wire format ──

GOLDEN: list[tuple[Kind, str, dict[str, Any], list[str]]] = [
    (
        "chat",
        "",
        chat(system(SYSTEM), user(QUESTION)),
        ["65eec1527d72a033", "fcd3428c3b6c58bf", "6ac62615e7712074"],
    ),
    (
        "chat",
        "",
        chat(user("Zoë 日本 😀 " * 12)),
        ["a8b6736bbeaf9c43", "5688b6df01f3d37c", "72f64ec9dd97b191", "807749c2c8af7ae4"],
    ),
    (
        "chat",
        "lora-a",
        chat(
            user(
                [{"type": "text", "text": "one"}, {"type": "image_url", "image_url": {"url": "x"}}]
            ),
            assistant(None, tool_calls=[{"id": "c", "function": {"name": "f", "arguments": "{}"}}]),
            {"role": "tool", "content": "17.5 degrees", "tool_call_id": "c", "name": "f"},
            tools=[{"type": "function", "function": {"name": "f", "strict": True, "max": 1.5}}],
            tool_choice="none",
            cache_salt="s",
            chat_template_kwargs={"enable_thinking": False, "budget": 3, "none": None},
        ),
        ["dc3285ac288d92bd", "5c38851b9b9bed79", "d4a9f31e8d4c7568"],
    ),
    (
        "chat",
        "",
        chat(user([{"type": "image_url", "uuid": "cat-1"}, "What is it?"])),
        ["a8b6736bbeaf9c43", "8d6f983b6b44a7a8"],
    ),
    (
        "completion",
        "",
        {"prompt": "Once upon a time, " * 12},
        ["71ba0098d05f06d5", "51b52c3e9bb266a8", "8077da54ff9dc127"],
    ),
    (
        "completion",
        "",
        {"prompt": list(range(40)), "add_special_tokens": False},
        ["c2d81a0cd97cc3d1", "58cde6a1153053c3"],
    ),
]


def test_the_wire_format_stays():
    found = [
        [f"{key:016x}" for key in keys_of(body, kind, adapter)] for kind, adapter, body, _ in GOLDEN
    ]
    assert found == [expected for *_, expected in GOLDEN]


def test_a_part_that_is_no_text_ends_with_a_chunk():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    other = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAB"}}
    text = {"type": "text", "text": "What is it?"}
    result = reduced(chat(user([text, image, text])))
    (span,) = result.media
    assert (span.start, span.end, span.message) == (18, CHUNK_BYTES, 0)
    assert result.data[span.start + 17 : span.end] == b"\xf9" * 29
    assert result.data[CHUNK_BYTES:] == b"\xfdWhat is it?"
    keys = keys_of(chat(user([text, image])), "chat")
    assert keys == keys_of(chat(user([text, image, text])), "chat")
    assert keys[0] == keys_of(chat(user([text, other])), "chat")[0]
    assert keys[1] != keys_of(chat(user([text, other])), "chat")[1]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "audio_url"])
def test_a_file_with_a_uuid_has_the_key_of_its_uuid_alone(kind):
    def keys(**fields):
        return keys_of(
            chat(user([{"type": kind, **fields}, {"type": "text", "text": "a"}])), "chat"
        )

    brought = keys(**{kind: {"url": "data:image/png;base64,AAAA"}}, uuid="cat")
    assert brought == keys(uuid="cat") == keys(uuid="cat", **{kind: {}}) == keys(uuid="cat", x=None)
    others = [
        brought,
        keys(uuid="dog"),
        keys(**{kind: {"url": "data:image/png;base64,AAAA"}}),
        keys(**{kind: {"url": "data:image/png;base64,AAAA"}}, uuid=""),  # no name
        keys(**{kind: {"url": "data:image/png;base64,AAAA"}}, uuid=["cat"]),
        keys_of(chat(user([{"type": kind, "uuid": "cat"}]), cache_salt="s"), "chat"),
    ]
    assert len({found[1] for found in others}) == len(others)
    # Of parts that have no uuid in their protocol it is one more field.
    block = {"type": "image", "source": {"data": "AAAA"}, "uuid": "cat"}
    other = {**block, "source": {"data": "AAAB"}}
    first, second = (keys_of(chat(user([part])), "messages") for part in (block, other))
    assert first[1] != second[1]


def test_the_data_of_a_conversation_in_full():
    body = chat(
        system("Be brief."),
        user([{"type": "text", "text": "a"}, "b"]),
        assistant("", tool_calls=[{"n": 1}], name="x", reasoning_content="hm"),
    )
    result = reduced(body)
    assert result.data == (
        b"\xffsystem\xfeBe brief."
        b"\xffuser\xfea\xfdb"
        b"\xffassistant\xfe\xfbname\xfasx\xfa\xfbtool_calls\xfa[{n\xfai1;}]\xfbreasoning\xfashm\xfa"
    )
    texts = [(result.data[span.start : span.end], span.message) for span in result.spans]
    assert texts == [(b"Be brief.", 0), (b"a", 1), (b"b", 1), (b"", 2)]


def test_keys_are_chained_digests_of_whole_chunks():
    result = reduced(chat(system(SYSTEM), user(QUESTION)))
    parent, expected = result.root, []
    for at in range(0, len(result.data) - 63, 64):
        material = struct.pack("<Q", parent) + result.data[at : at + 64]
        digest = blake2b(material, digest_size=8, person=b"octavo route").digest()
        parent = int.from_bytes(digest, "little")
        expected.append(parent)
    assert len(expected) == len(result.data) // CHUNK_BYTES == 2
    assert chain(result.root, result.data) == expected
    assert chain(result.root, result.data, known=expected[:1]) == expected
    assert lookup_keys(result) == [opening(result), *expected]


def test_the_root_of_a_plain_chat_covers_version_and_form():
    material = VERSION + b"\xfachat\xfa\xfa\xfa"
    digest = blake2b(material, digest_size=8, person=b"octavo route 0").digest()
    assert reduced(chat(user("a"))).root == int.from_bytes(digest, "little")


def test_the_opening_names_what_stands_before_the_first_text():
    assert opening(reduced(chat(user("a")))) == opening(reduced(chat(user("b"), user("c"))))
    assert opening(reduced(chat(user("a")))) != opening(reduced(chat(system("a"))))
    assert opening(reduced(chat(user("a")))) != opening(reduced(chat(user("a"), cache_salt="s")))
    assert len(keys_of(chat(user("a")), "chat")) == 1
    assert keys_of({"prompt": "a"}, "completion") == []


def test_packed_keys_are_little_endian_and_come_back():
    assert pack_keys([1, 2**64 - 1]) == b"\1" + bytes(7) + b"\xff" * 8
    assert unpack_keys(pack_keys([1, 2**64 - 1])) == (1, 2**64 - 1)
    assert pack_keys([]) == b""


# ── what makes no difference ──


def test_neither_model_nor_sampling_nor_the_order_of_fields_matters():
    plain = keys_of(chat(user(QUESTION)), "chat")
    other = {"temperature": 1, "n": 3, "messages": [{"content": QUESTION, "role": "user"}]}
    assert keys_of(other | {"model": "other", "stream": True, "stop": ["x"]}, "chat") == plain


def test_what_shapes_only_the_end_of_the_prompt_does_not_matter():
    plain = keys_of(chat(user(QUESTION)), "chat")
    assert keys_of(chat(user(QUESTION), add_generation_prompt=False), "chat") == plain
    assert keys_of(chat(user(QUESTION), continue_final_message=True), "chat") == plain


def test_empty_fields_are_absent_ones():
    plain = reduced(chat(user(QUESTION), assistant(None)))
    sent_back = assistant("", tool_calls=[], refusal=None, reasoning=None, name="")
    fields: dict[str, Any] = {
        "tools": [],
        "chat_template_kwargs": {},
        "documents": None,
        "cache_salt": None,
    }
    assert reduced(chat(user(QUESTION), sent_back, **fields)) == plain


def test_one_text_part_is_a_text_and_the_older_name_of_reasoning_is_read():
    parts = user([{"type": "text", "text": QUESTION}])
    assert reduced(chat(parts)).data == reduced(chat(user(QUESTION))).data
    newer = reduced(chat(user("a"), assistant("b", reasoning="hm")))
    assert reduced(chat(user("a"), assistant("b", reasoning_content="hm"))) == newer


def test_what_requests_say_anyway_is_no_difference():
    assert reduced(chat(user("a"), add_special_tokens=False)) == reduced(chat(user("a")))
    text = reduced({"prompt": "a"}, "completion")
    assert reduced({"prompt": "a", "add_special_tokens": True}, "completion") == text
    assert reduced(chat(user("a"), tool_choice="none")) == reduced(chat(user("a")))


# ── what makes a difference ──


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"documents": [{"text": "d"}]},
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "low"},
        {"mm_processor_kwargs": {"size": 1}},
        {"add_special_tokens": True},
        {"truncate_prompt_tokens": 100},
        {"truncation_side": "left"},
        {"cache_salt": "tenant"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_whatever_else_shapes_the_prompt_changes_every_key(fields):
    plain = keys_of(chat(user(QUESTION)), "chat")
    changed = keys_of(chat(user(QUESTION), **fields), "chat")
    assert len(changed) == len(plain) == 2
    assert not set(changed) & set(plain)


def test_an_adapter_and_hidden_tools_change_every_key():
    plain = chat(user(QUESTION), tools=[{"a": 1}])
    others = [
        keys_of(plain, "chat"),
        keys_of(plain, "chat", "lora"),
        keys_of({**plain, "tool_choice": "none"}, "chat"),
        keys_of({"prompt": QUESTION}, "completion"),
    ]
    assert len({key for keys in others for key in keys}) == sum(map(len, others)) == 7
    assert keys_of({**plain, "tool_choice": "auto"}, "chat") == others[0]


def test_text_cannot_pass_for_structure():
    honest = reduced(chat(user("a"), user("b")))
    for trick in ("a\xffuser\xfeb", "a\x1euser\x1fb", "a\ufffduser\ufffdb"):
        assert reduced(chat(user(trick))).data != honest.data


VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    10**30,
    0.0,
    -0.0,
    1.0,
    1e300,
    "",
    "0",
    "null",
    [],
    {},
]
VALUES += [
    [[]],
    [[], []],
    [{}],
    {"a": []},
    {"": ""},
    {"a": 1, "b": 2},
    {"b": 2, "a": 1},
    ["a", "b"],
]
VALUES += [["ab"], {"a": {"b": 1}}, {"a": {}, "b": 1}, "\x00", "é", "e\u0301", "\U0001f600"]


def test_different_values_are_packed_differently():
    assert len({pack_value(value) for value in VALUES}) == len(VALUES)
    with pytest.raises(TypeError, match="cannot cover a set"):
        pack_value({1})


# ── prefixes ──

texts = st.text(max_size=150)
turns = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), texts), max_size=5)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(turns, turns)
def test_a_longer_conversation_keeps_the_keys_of_its_beginning(first, more):
    messages = [{"role": role, "content": content} for role, content in first + more]
    short = keys_of(chat(*messages[: len(first)]), "chat")[1:]
    long = keys_of(chat(*messages), "chat")[1:]
    assert long[: len(short)] == short
    assert len(set(long)) == len(long)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(turns, texts)
def test_the_next_turn_begins_with_what_the_answer_foretold(first, answer):
    messages = [{"role": role, "content": content} for role, content in first]
    foretold = continuation(reduced(chat(*messages)), answer)
    following = reduced(chat(*messages, assistant(answer), user("And then?")))
    assert foretold is not None
    assert following.root == foretold.root
    assert following.data.startswith(foretold.data)
    assert following.spans[:-1] == foretold.spans
    assert foretold.data[slice(*foretold.spans[-1][:2])] == answer.encode()


def test_an_answer_that_continues_a_message_belongs_to_it():
    requested = reduced(chat(user("Count."), assistant("One, "), continue_final_message=True))
    foretold = continuation(requested, "two.")
    assert foretold is not None
    assert foretold.data == reduced(chat(user("Count."), assistant("One, two."))).data
    assert foretold.spans[-1] == Span(23, 32, 1)


def test_nothing_foretells_the_prompt_after_a_completion():
    assert continuation(reduced({"prompt": "Once"}, "completion"), " upon") is None


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
                    lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(texts, inner, max_size=3), max_leaves=8))  # fmt: skip
def test_a_value_is_packed_alike_after_a_trip_through_json(value):
    assert pack_value(json.loads(json.dumps(value))) == pack_value(value)


# ── completions ──


def test_sixteen_token_ids_are_a_chunk():
    ids = reduced({"prompt": list(range(33))}, "completion")
    assert (ids.form, ids.data[:8], ids.spans) == ("ids", struct.pack("<2I", 0, 1), [])
    assert len(keys_of({"prompt": list(range(33))}, "completion")) == 2


def test_of_several_prompts_the_first_is_named():
    assert reduced({"prompt": ["ab", "cd"]}, "completion") == reduced(
        {"prompt": "ab"}, "completion"
    )
    nested = reduced({"prompt": [[1, 2], [3]]}, "completion")
    assert nested == reduced({"prompt": [1, 2]}, "completion")


def test_text_and_ids_of_equal_bytes_differ():
    text = "\x01\x00\x00\x00" * 16
    assert not set(keys_of({"prompt": text}, "completion")) & set(
        keys_of({"prompt": [1] * 16}, "completion")
    )


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("chat", {}),
        ("chat", {"messages": "hi"}),
        ("chat", {"messages": ["hi"]}),
        ("chat", {"messages": [{"content": "hi"}]}),
        ("chat", {"messages": [{"role": 1, "content": "hi"}]}),
        ("chat", {"messages": [{"role": "user", "content": 1}]}),
        ("completion", {}),
        ("completion", {"prompt": {"a": 1}}),
        ("completion", {"prompt": [1, "a"]}),
        ("completion", {"prompt": [-1]}),
        ("completion", {"prompt": [2**32]}),
        ("completion", {"prompt": [True]}),
        ("completion", {"prompt": [[1.0]]}),
    ],
)
def test_what_no_engine_would_take_has_no_keys(kind, body):
    assert canonical(body, kind=kind) is None
    assert keys_of(body, kind) == []


def test_half_a_surrogate_pair_fails_no_request():
    assert reduced(chat(user("\ud800"))).data == b"\xffuser\xfe\xed\xa0\x80"
