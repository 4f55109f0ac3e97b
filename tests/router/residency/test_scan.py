"""Reading a request's body: what is found, what is refused, and where."""

import json
import sys
import time

import pytest

from octavo_engine.protocol.route_keys import keys_of, pack_keys
from octavo_router.residency import native
from octavo_router.residency.api import CHAT, COMPLETION, MAX_DEPTH, OTHER, ScanError

LONG = "The quick brown fox jumps over the lazy dog. " * 5


def chat(**fields):
    body = {"model": "m", "messages": [{"role": "user", "content": LONG}], **fields}
    return json.dumps(body).encode()


def refusal(hot_path, body, kind=CHAT):
    with pytest.raises(ScanError) as caught:
        hot_path.scan(body, kind)
    return caught.value


# ── what is found ──


def test_a_chat_is_read_at_once(hot_path):
    body = {
        "model": "smollm2",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": LONG}],
        "max_tokens": 7,
        "max_completion_tokens": 64,
        "n": 2,
        "priority": -3,
        "user": "u",
        "cache_salt": "s",
        "session_id": "z",
    }
    raw = json.dumps(body).encode()
    scan = hot_path.scan(raw, CHAT)
    assert (scan.model, scan.stream, scan.include_usage) == ("smollm2", True, True)
    assert (scan.max_tokens, scan.num_answers, scan.priority) == (64, 2, -3)
    assert (scan.user, scan.cache_salt, scan.session) == ("u", "s", "z")
    assert (scan.num_prompts, scan.num_prompt_ids) == (1, 0)
    assert scan.prompt_bytes == len(b"\xffuser\xfe") + len(LONG)
    assert scan.keys == pack_keys(keys_of(body, "chat"))
    assert len(scan.keys) == 8 * (1 + scan.prompt_bytes // 64)


def test_an_empty_body_of_a_request_has_defaults(hot_path):
    scan = hot_path.scan(b" {}\n", CHAT)
    assert (scan.model, scan.model_start, scan.model_end, scan.stream) == ("", 0, 0, False)
    assert (scan.max_tokens, scan.num_answers, scan.num_prompts) == (0, 1, 0)
    assert (scan.prompt_bytes, scan.keys, scan.session) == (0, b"", "")


def test_the_model_can_be_replaced_where_it_stands(hot_path):
    raw = '{"é": ["model", {"model": 1}], "mod\\u0065l" :  "caf\\u00e9 ☕", "n": 2}'.encode()
    scan = hot_path.scan(raw, OTHER)
    assert scan.model == "café ☕"
    changed = raw[: scan.model_start] + b'"other"' + raw[scan.model_end :]
    assert json.loads(changed) == {"é": ["model", {"model": 1}], "model": "other", "n": 2}


def test_keys_come_whatever_the_order_and_the_spelling(hot_path):
    plain = hot_path.scan(b'{"messages":[{"role":"user","content":"%s"}]}' % (b"ab/" * 99), CHAT)
    spelled = hot_path.scan(
        b'{"x":{"messages":1},\n"messages" : [ {"content": "%s", "\\u0072ole":"us\\u0065r"}\t] }'
        % (b"\\u0061b\\/" * 99),
        CHAT,
    )
    assert spelled.keys == plain.keys != b""


def test_an_adapter_has_keys_of_its_own(hot_path):
    adapters = {"poet": "lora-7"}
    named = hot_path.scan(chat(model="poet"), CHAT, adapters)
    assert named.keys == pack_keys(keys_of(json.loads(chat()), "chat", "lora-7"))
    assert hot_path.scan(chat(), CHAT, adapters).keys == hot_path.scan(chat(), CHAT).keys


def test_tools_and_documents_count_as_prompt(hot_path):
    plain = hot_path.scan(chat(), CHAT).prompt_bytes
    assert hot_path.scan(chat(tools=[{"a": LONG}]), CHAT).prompt_bytes > plain + len(LONG)
    assert hot_path.scan(chat(documents=[LONG]), CHAT).prompt_bytes > plain + len(LONG)
    assert hot_path.scan(chat(metadata=[LONG]), CHAT).prompt_bytes == plain


@pytest.mark.parametrize("url", ["data:image/png;base64," + "A" * 100_000, "https://a.org/b.png"])
def test_an_image_takes_as_much_as_a_digest_and_the_rest_of_its_chunk(hot_path, url):
    image = {"type": "image_url", "image_url": {"url": url}}
    text = {"type": "text", "text": "What is it?"}
    body = {"messages": [{"role": "user", "content": [text, image]}]}
    scan = hot_path.scan(json.dumps(body).encode(), CHAT)
    assert scan.prompt_bytes == 64
    assert scan.keys == pack_keys(keys_of(body, "chat"))
    assert len(scan.keys) == 8 * 2  # the opening, and what ends with the picture


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "audio_url", "input_image"])
@pytest.mark.parametrize("name", ["cat", "é😀", "", None, 7, ["cat"]])
@pytest.mark.parametrize("value", [{}, None, {"url": "data:image/png;base64,AAAA"}])
def test_media_with_a_uuid_have_the_keys_of_the_engine(hot_path, kind, name, value):
    part = {"uuid": name, kind: value, "type": kind}
    body = {"messages": [{"role": "user", "content": [part, "What is it?"]}]}
    raw = json.dumps(body).encode()
    keys = pack_keys(keys_of(json.loads(raw), "chat"))
    assert hot_path.scan(raw, CHAT).keys == keys
    named = {"messages": [{"role": "user", "content": [{"type": kind, "uuid": name}]}]}
    is_named = bool(name) and isinstance(name, str) and kind != "input_image"
    assert (pack_keys(keys_of(named, "chat")) == keys) is is_named


@pytest.mark.parametrize("num_chars", range(30, 46))
def test_pictures_at_any_place_have_the_keys_of_the_engine(hot_path, num_chars):
    """Pictures whose marks, digests and paddings fall on every place of a chunk."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    text = {"type": "text", "text": "x" * num_chars}
    body = {"messages": [{"role": "user", "content": [text, image, image, text]}]}
    scan = hot_path.scan(json.dumps(body).encode(), CHAT)
    assert scan.keys == pack_keys(keys_of(body, "chat"))
    assert scan.prompt_bytes % 64 == (1 + num_chars) % 64


@pytest.mark.parametrize(
    ("prompt", "prompts", "num_bytes", "ids"),
    [
        ("é" * 100, 1, 200, 0),
        (["abc", "de"], 2, 5, 0),
        (list(range(100)), 1, 0, 100),
        ([[1, 2, 3], [4]], 2, 0, 4),
        ([], 0, 0, 0),
        (None, 0, 0, 0),
    ],
)
def test_prompts_of_a_completion_are_measured(hot_path, prompt, prompts, num_bytes, ids):
    body = {"prompt": prompt}
    scan = hot_path.scan(json.dumps(body).encode(), COMPLETION)
    assert (scan.num_prompts, scan.prompt_bytes, scan.num_prompt_ids) == (prompts, num_bytes, ids)
    assert scan.keys == pack_keys(keys_of(body, "completion"))


@pytest.mark.parametrize(
    ("fields", "session"),
    [
        ({"session_params": {"session_id": "b"}, "prompt_cache_key": "c"}, "b"),
        ({"session_id": "", "prompt_cache_key": "c"}, "c"),
        ({"session_id": 5, "session_params": "b"}, ""),
    ],
)
def test_a_session_is_named_in_one_of_three_fields(hot_path, fields, session):
    assert hot_path.scan(json.dumps(fields).encode(), OTHER).session == session


@pytest.mark.parametrize(
    "field",
    ["model", "stream", "stream_options", "max_tokens", "n", "priority", "user", "cache_salt"],
)
@pytest.mark.parametrize("wrong", [None, [], {}, 1.5, 2**60, -(2**70)])
def test_a_field_of_the_wrong_type_is_left_for_the_engine_to_refuse(hot_path, field, wrong):
    scan = hot_path.scan(chat(**{field: wrong}), CHAT)
    plain = hot_path.scan(chat(), CHAT)
    if field != "model":
        assert getattr(scan, field if hasattr(scan, field) else "keys") == getattr(
            plain, field if hasattr(plain, field) else "keys"
        )
    assert scan.keys == plain.keys


def test_a_body_for_another_path_is_read_for_what_all_share(hot_path):
    scan = hot_path.scan(b'{"model":"m","input":"text","messages":[1],"prompt":2}', OTHER)
    assert (scan.model, scan.keys, scan.num_prompts) == ("m", b"", 0)


# ── what is refused ──


@pytest.mark.parametrize(
    ("body", "offset"),
    [
        (b'{"a" 1}', 5),
        (b'{"a":1,}', 7),
        (b'{"a":1} x', 8),
        (b'{"a":tru}', 5),
        (b"[1 2]", 3),
        (b'{"a":"b', 5),
        (b'{"a":"\xc3\xa9\n"}', 8),
        (b'{"a":"b\xff"}', 7),
        (b'{"\xed\xa0\x80":1}', 2),
        (b'{"a":"\xc3\xa9\\ud83d!"}', 8),
        (b'{"a":"\\udc00"}', 6),
        (b"   ", 3),
        (b"", 0),
        (b"  [1]", 2),
    ],
)
def test_what_is_no_json_is_refused_with_its_place(hot_path, body, offset):
    error = refusal(hot_path, body)
    if body == b'{"a":1,}' and not hot_path.is_native and sys.version_info >= (3, 13):
        offset -= 1  # Python's decoder points at the comma since then
    assert error.offset == offset
    assert error.message[0].islower() or error.message.startswith("\\u")
    assert str(error) == error.message


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":NaN}', b'{"a":[Infinity]}', b'{"a":-Infinity}', b'{"a":1e999}', b'{"a":01}',
        b'{"a":+1}', b'{"a":.5}', b'{"a":1.}', b'{"a":1e}', b'{"a":0x1}', b"{'a':1}", b"{a:1}",
        b'{"a":"\\x"}', b'{"a":"\\u12g4"}', b'{"a":"\x00"}', b'{"a":\x00}', b'\xef\xbb\xbf{"a":1}',
        b'\xff\xfe{\x00}\x00', b'{"a":"\xc0\x80"}', b'{"a":"\xf5\x80\x80\x80"}', b'{"a":1}{"a":1}',
        b'{"a":' + b"1" * 10_000 + b"}", b'"text"', b"1", b"null", b"{", b'{"a":[}', b"[]]",
    ],
)  # fmt: skip
def test_strict_json_only(hot_path, body):
    refusal(hot_path, body)


@pytest.mark.parametrize("count", [2, 16, 17, 5000])
def test_a_key_given_twice_is_named(hot_path, count):
    pairs = b",".join(b'"k%d":0' % number for number in range(count))
    hot_path.scan(b"{%s}" % pairs, OTHER)
    assert "k1 is given twice" in refusal(hot_path, b'{%s,"\\u006b1":0}' % pairs).message
    assert "k1 is given twice" in refusal(hot_path, b'{"a":[{%s,"k1":0}]}' % pairs).message
    hot_path.scan(b'{"k1":{%s}}' % pairs, OTHER)


def test_nesting_has_a_limit(hot_path):
    inner = MAX_DEPTH - 1
    hot_path.scan(b'{"a":' + b"[" * inner + b"]" * inner + b"}", OTHER)
    too_deep = refusal(hot_path, b'{"a":' + b"[" * (inner + 1) + b"]" * (inner + 1) + b"}")
    assert "deeper than 32" in too_deep.message
    messages = b'{"messages":[{"role":"user","content":' + b"[" * 30 + b"]" * 30 + b"}]}"
    refusal(hot_path, messages)
    hot_path.scan(messages.replace(b"[" * 30, b"[" * 29).replace(b"]" * 30, b"]" * 29), CHAT)


def test_an_unknown_kind_is_the_callers_mistake(hot_path):
    if hot_path.is_native:
        with pytest.raises(ValueError, match="kind must be"):
            hot_path.scan(b"{}", 5)


# ── hostile shapes ──

MIB = 2**20
HOSTILE = {  # made when they are wanted: each is megabytes
    "brackets": lambda: b"[" * 100_000,
    "objects": lambda: b'{"a":' * 10_000,
    "keys": lambda: b"{" + b",".join(b'"%x":0' % number for number in range(1_000_000)) + b"}",
    "text": lambda: b'{"messages":[{"role":"user","content":"' + b"a" * (8 * MIB) + b'"}]}',
    "escapes": lambda: b'{"messages":[{"role":"user","content":"' + b'\\"' * (4 * MIB) + b'"}]}',
    "parts": lambda: b'{"messages":[{"role":"user","content":[' + b'"a",' * (2 * MIB) + b'"a"]}]}',
    "messages": lambda: b'{"messages":[' + b'{"role":"u"},' * 500_000 + b'{"role":"u"}]}',
    "digits": lambda: b'{"a":' + b"9" * 10_000 + b"}",
    "open": lambda: b'{"a":"' + b"a" * (8 * MIB),
}


@pytest.mark.parametrize("shape", HOSTILE)
def test_no_shape_of_a_body_takes_long(shape):
    """Time grows with size only: the limit is many times what it takes, far below its square."""
    hot_path = native.load()
    assert hot_path.is_native
    body = HOSTILE[shape]()
    started = time.thread_time()
    for kind in (CHAT, COMPLETION):
        outcome = None
        try:
            outcome = hot_path.scan(body, kind)
        except ScanError as error:
            assert shape in ("brackets", "objects", "digits", "open"), error
        assert (outcome is None) == (shape in ("brackets", "objects", "digits", "open"))
    assert time.thread_time() - started < 5.0
