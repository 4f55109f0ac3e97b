"""Route keys: names of prompt prefixes that need no tokenizer. The definition, for both sides.

A request's JSON body is reduced to a *root* and to *data*. The root stands for all that shapes the
prompt but is not part of the conversation; the data is the conversation, or the prompt, in bytes.
Key i names the first 64 * (i + 1) bytes of the data, below that root:

    root  = blake2b-64(version, form, adapter, salt, the fields of ROOT_FIELDS that are given)
    key i = blake2b-64(key i - 1 or root, data[64 * i : 64 * (i + 1)])

The adapter is the digest of its content; its name, where a server does not report that.
Only whole chunks have keys. The engine knows how many tokens of its KV cache a key stands for; a
router compares keys and need not know. Both sides read a body alike, whatever the order of its
fields and however its strings are escaped:

    chat     data = for each message: MESSAGE role CONTENT content, then its FIELDs
             content = a text, or parts joined by PART; a part that is no text is MEDIA, the digest
             of the part as it was sent, and PADs up to the end of a chunk: a key covers it whole.
             Of a NAMED_PART with a uuid only type and uuid are hashed: the request that brings a
             file and those that name it have one key
             FIELD  = name END value, in the order of MESSAGE_FIELDS
    messages data = as a chat, but for line ends between parts. `system` comes first; a tool_use is
             a message of that role: no text, and itself as a FIELD; a tool_result is its id's
             digest and its content
    responses data = as a chat. `instructions` come first; other items are written as a tool_use, a
             function_call_output as its id's digest and its output
    text     data = the prompt in UTF-8; of a list of prompts, the first
    ids      data = the token ids, u32 little-endian

The marks are bytes that UTF-8 never uses: no text can pass for structure. Null and empty values
count as absent, for clients send messages back with them and without. Left out on purpose are the
model (keys are compared within one engine), sampling, and what shapes only the prompt's end
(add_generation_prompt, continue_final_message): it comes after all data.

csrc/router holds the same definition for the router's hot path; tests keep the two equal.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

CHUNK_BYTES = 64
KEY_BYTES = 8
VERSION = b"octavo-route-3"  # raise it when the recipe changes: old and new must never meet

Kind = Literal["chat", "completion", "messages", "responses"]
Form = Literal["chat", "text", "ids"]

MESSAGE = b"\xff"
CONTENT = b"\xfe"
PART = b"\xfd"
MEDIA = b"\xfc"
FIELD = b"\xfb"
END = b"\xfa"
PAD = b"\xf9"

# The fields outside of messages that shape a prompt, in the order in which the root covers them.
ROOT_FIELDS: Mapping[Kind, tuple[str, ...]] = {
    "chat": (
        "tools",
        "documents",
        "chat_template",
        "chat_template_kwargs",
        "reasoning_effort",
        "mm_processor_kwargs",
        "add_special_tokens",
        "truncate_prompt_tokens",
        "truncation_side",
    ),
    "completion": ("add_special_tokens", "truncate_prompt_tokens", "truncation_side"),
    "messages": ("tools", "chat_template_kwargs", "thinking", "output_config"),
    "responses": ("tools", "chat_template_kwargs", "reasoning"),
}
# Whether a prompt gets the tokenizer's special tokens where the request does not say.
ADD_SPECIAL_TOKENS: Mapping[Kind, bool] = {
    "chat": False, "completion": True, "messages": False, "responses": False,
}  # fmt: skip
# The fields of a message besides role and content that templates write.
MESSAGE_FIELDS = ("name", "tool_call_id", "tool_calls", "reasoning")
TEXT_PARTS = ("text", "input_text", "output_text")
# The parts that later requests may send by their uuid alone.
NAMED_PARTS = ("image_url", "input_audio", "audio_url")

_KEY_PERSON = b"octavo route"
_ROOT_PERSON = b"octavo route 0"
_MEDIA_PERSON = b"octavo media"
_MEDIA_BYTES = 16
_MAX_TOKEN_ID = 2**32 - 1


class Span(NamedTuple):
    """Where a text lies in the data: a message's content, or one of its parts, or the prompt."""

    start: int
    end: int
    message: int = 0  # which message's


@dataclass(frozen=True, slots=True)
class Canonical:
    """What a body comes down to. Two bodies with equal roots and data make the same prompt."""

    form: Form
    root: int
    data: bytes
    spans: list[Span]  # in order; a message without content has an empty one
    is_open: bool = False  # the answer continues the last message instead of following it
    media: tuple[Span, ...] = ()  # the parts that are no text, in order


def canonical(body: Mapping[str, Any], *, kind: Kind, adapter: str = "") -> Canonical | None:
    """A decoded body's root and data. None where it has no prompt that an engine would take."""
    if kind != "completion":
        conversation = _conversation_of(body, kind)
        if conversation is None:
            return None
        writer, continues = conversation
        data, spans = bytes(writer.data), writer.spans
        # Fields after the content would separate it from an answer that continues it.
        is_open = continues and bool(spans) and spans[-1].end == len(data)
        root = _root(body, kind, "chat", adapter)
        return Canonical("chat", root, data, spans, is_open, tuple(writer.media))
    prompt = _first_prompt(body.get("prompt"))
    if prompt is None:
        return None
    if isinstance(prompt, str):
        data = _utf8(prompt)
        return Canonical("text", _root(body, kind, "text", adapter), data, [Span(0, len(data))])
    ids = struct.pack(f"<{len(prompt)}I", *prompt)
    return Canonical("ids", _root(body, kind, "ids", adapter), ids, [])


def chain(root: int, data: bytes, *, known: Sequence[int] = ()) -> list[int]:
    """The keys of all whole chunks of `data`; those of its beginning may be known already."""
    keys = list(known)
    parent = (keys[-1] if keys else root).to_bytes(KEY_BYTES, "little")
    start = len(keys) * CHUNK_BYTES
    for at in range(start, len(data) - CHUNK_BYTES + 1, CHUNK_BYTES):
        chunk = data[at : at + CHUNK_BYTES]
        parent = blake2b(parent + chunk, digest_size=KEY_BYTES, person=_KEY_PERSON).digest()
        keys.append(int.from_bytes(parent, "little"))
    return keys


def opening(canonical: Canonical) -> int:
    """The name of what comes before the first part: what a template writes whatever the chat is.

    The key of a chunk that ends where the first text or picture begins. It stands before key 0: an
    engine stores it too, and a chat none of whose keys is stored finds that much cached.
    """
    first = canonical.data[: opening_end(canonical)]
    material = canonical.root.to_bytes(KEY_BYTES, "little") + first
    digest = blake2b(material, digest_size=KEY_BYTES, person=_KEY_PERSON).digest()
    return int.from_bytes(digest, "little")


def opening_end(canonical: Canonical) -> int:
    """Where the first part begins in the data."""
    return min((*canonical.spans[:1], *canonical.media[:1]), default=Span(0, 0)).start


def keys_of(body: Mapping[str, Any], kind: Kind, adapter: str = "") -> list[int]:
    """What a router looks a request's prompt up by; nothing where it has no prompt."""
    reduced = canonical(body, kind=kind, adapter=adapter)
    return [] if reduced is None else lookup_keys(reduced)


def lookup_keys(canonical: Canonical) -> list[int]:
    """The chain's keys, behind the opening of a chat; nothing is written before other prompts."""
    keys = chain(canonical.root, canonical.data)
    return [opening(canonical), *keys] if canonical.form == "chat" else keys


def pack_keys(keys: Sequence[int]) -> bytes:
    """Keys as little-endian u64, end to end."""
    return struct.pack(f"<{len(keys)}Q", *keys)


def unpack_keys(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // KEY_BYTES}Q", packed)


def continuation(canonical: Canonical, answer: str) -> Canonical | None:
    """How the conversation's next turn begins if the client sends `answer` back as the assistant's.

    None for completions: their next prompt is not known.
    """
    if canonical.form != "chat":
        return None
    text = _utf8(answer)
    if canonical.is_open:
        data = canonical.data + text
        last = canonical.spans[-1]
        spans = [*canonical.spans[:-1], last._replace(end=len(data))]
    else:
        opened = canonical.data + MESSAGE + b"assistant" + CONTENT
        data = opened + text
        number = canonical.spans[-1].message + 1 if canonical.spans else 0
        spans = [*canonical.spans, Span(len(opened), len(data), number)]
    return replace(canonical, data=data, spans=spans, is_open=False)


# ── the conversation ──


def _conversation_of(body: Mapping[str, Any], kind: Kind) -> tuple[_Writer, bool] | None:
    """What was written, and whether the answer continues the last message."""
    writer = _Writer()
    messages = body.get("messages")
    if kind == "responses":
        # What was said before is kept by one engine, and what is dropped is known to it alone.
        if body.get("previous_response_id") is not None or body.get("truncation") == "auto":
            return None
        is_valid = writer.opening(body.get("instructions")) and writer.items(body.get("input"))
        return (writer, False) if is_valid else None
    if not isinstance(messages, list):
        return None
    if kind == "messages":
        writer.separator = b"\n"  # texts beside each other become one
        if not (writer.opening(body.get("system")) and all(map(writer.turn, messages))):
            return None
        continues = bool(messages) and messages[-1]["role"] == "assistant"
    else:
        if not all(map(writer.message, messages)):
            return None
        continues = body.get("continue_final_message") is True
    return writer, continues


class _Writer:
    """Puts messages into data, one after another. Each method returns whether it was one."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.spans: list[Span] = []
        self.media: list[Span] = []  # the parts that are no text
        self.separator = PART  # between the parts of a content
        self._number = -1  # of the message that is written

    def message(self, message: Any) -> bool:
        """Of a chat."""
        if not self._begin(message) or not self._content(message.get("content")):
            return False
        for name, value in _message_fields(message):
            self._field(name, value)
        return True

    def turn(self, message: Any) -> bool:
        """Of /v1/messages."""
        return self._begin(message) and self._content(message.get("content"), has_blocks=True)

    def opening(self, text: Any) -> bool:
        """The instructions, which stand before all messages."""
        return _is_absent(text) or (self._begin({"role": "system"}) and self._content(text))

    def items(self, given: Any) -> bool:
        """The input of /v1/responses."""
        if isinstance(given, str):
            return self.message({"role": "user", "content": given})
        return isinstance(given, list) and all(map(self._item, given))

    def _item(self, item: Any) -> bool:
        if not isinstance(item, dict):
            return False
        kind = item.get("type", "message")
        if kind == "message":
            return self._begin(item) and self._content(item.get("content"))
        if not isinstance(kind, str):
            return False
        if kind == "function_call_output":
            self._begin({"role": kind})
            self._media(item.get("call_id"))
            self.data += self.separator
            return self._content(item.get("output"))
        self._apart(kind, item)
        return True

    def _apart(self, kind: str, value: Any) -> None:
        """As a message of its own: the text before it is given by itself."""
        self._begin({"role": kind})
        self._text("")
        self._field("item", value)

    def _begin(self, message: Any) -> bool:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return False
        self._number += 1
        self.data += MESSAGE + _utf8(message["role"]) + CONTENT
        return True

    def _content(self, content: Any, *, has_blocks: bool = False) -> bool:
        match content:
            case None | str():
                self._text(content or "")
            case list():
                for index, part in enumerate(content):
                    if index:
                        self.data += self.separator
                    self._part(part, has_blocks=has_blocks)
            case _:
                return False
        return True

    def _part(self, part: Any, *, has_blocks: bool) -> None:
        text = _part_text(part)
        if text is not None:
            self._text(text)
            return
        kind = part.get("type") if has_blocks and isinstance(part, dict) else None
        if kind == "tool_use":
            self._apart("tool_use", part)
        elif kind == "tool_result" and not _is_absent(content := part.get("content")):
            self._media(part.get("tool_use_id"))
            self.data += self.separator
            if not self._content(content):
                self._media(content)
        else:
            start = len(self.data)
            self.data += MEDIA + _part_digest(part)
            # A prompt often ends with its picture: a key must end there too.
            self.data += PAD * (-len(self.data) % CHUNK_BYTES)
            self.media.append(Span(start, len(self.data), self._number))

    def _text(self, text: str) -> None:
        self.spans.append(_append(self.data, text, self._number))

    def _media(self, value: Any) -> None:
        self.data += MEDIA + _media_digest(value)

    def _field(self, name: str, value: Any) -> None:
        self.data += FIELD + name.encode() + END + pack_value(value)


def _append(data: bytearray, text: str, message: int) -> Span:
    start = len(data)
    data += _utf8(text)
    return Span(start, len(data), message)


def _part_text(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in TEXT_PARTS:
        text = part.get("text")
        return text if isinstance(text, str) else None
    return None


def _part_digest(part: Any) -> bytes:
    """Of a part that is no text."""
    if isinstance(part, dict) and part.get("type") in NAMED_PARTS:
        name = part.get("uuid")
        if isinstance(name, str) and name:
            # No packed value begins with this letter.
            return _digest(b"u" + _utf8(part["type"]) + END + _utf8(name) + END)
    return _media_digest(part)


def _media_digest(value: Any) -> bytes:
    # An image takes far fewer tokens than its base64 has bytes: one digest, not a chunk each 64.
    return _digest(pack_value(value))


def _digest(packed: bytes) -> bytes:
    return blake2b(packed, digest_size=_MEDIA_BYTES, person=_MEDIA_PERSON).digest()


def _message_fields(message: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in MESSAGE_FIELDS:
        value = message.get(name)
        if name == "reasoning" and _is_absent(value):
            value = message.get("reasoning_content")  # its older name
        if not _is_absent(value):
            yield name, value


# ── the prompt of a completion ──


def _first_prompt(prompt: Any) -> str | list[int] | None:
    if isinstance(prompt, list) and prompt and type(prompt[0]) is not int:
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(map(_is_token_id, prompt)):
        return prompt
    return None


def _is_token_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_TOKEN_ID


# ── the root ──


def _root(body: Mapping[str, Any], kind: Kind, form: Form, adapter: str) -> int:
    salt = body.get("cache_salt")
    salt = salt if isinstance(salt, str) else ""
    material = bytearray()
    for part in (VERSION, form.encode(), _utf8(adapter), _utf8(salt)):
        material += part + END
    for name, value in root_fields(body, kind):
        material += name.encode() + END + pack_value(value)
    digest = blake2b(material, digest_size=KEY_BYTES, person=_ROOT_PERSON).digest()
    return int.from_bytes(digest, "little")


def root_fields(body: Mapping[str, Any], kind: Kind) -> Iterator[tuple[str, Any]]:
    """What the root covers besides adapter and salt."""
    for name in ROOT_FIELDS[kind]:
        value = body.get(name)
        if _is_absent(value):
            continue
        if name == "add_special_tokens" and value is ADD_SPECIAL_TOKENS[kind]:
            continue
        yield name, value
        if name == "tools" and _hides_tools(body.get("tool_choice"), kind):
            yield "tool_choice", "none"  # some engines then hide the tools; no other choice matters


def _hides_tools(choice: Any, kind: Kind) -> bool:
    if kind == "messages":
        choice = choice.get("type") if isinstance(choice, dict) else None
    return bool(choice == "none")


def _is_absent(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)


# ── values ──


def pack_value(value: Any) -> bytes:
    """A JSON value in bytes: the same for all spellings of it, different for different values.

    The order of an object's keys counts, for templates write objects as they come.
    """
    packed = bytearray()
    _pack_into(packed, value)
    return bytes(packed)


def _pack_into(packed: bytearray, value: Any) -> None:
    match value:
        case None:
            packed += b"n"
        case True:
            packed += b"t"
        case False:
            packed += b"f"
        case str():
            packed += b"s" + _utf8(value) + END
        case int():
            packed += b"i%d;" % value
        case float():
            packed += b"d" + struct.pack("<d", value)
        case list() | tuple():
            packed += b"["
            for item in value:
                _pack_into(packed, item)
            packed += b"]"
        case dict():
            packed += b"{"
            for key, item in value.items():
                packed += _utf8(key) + END
                _pack_into(packed, item)
            packed += b"}"
        case _:
            raise TypeError(
                f"a route key cannot cover a {type(value).__name__}: it is no JSON value"
            )


def _utf8(text: str) -> bytes:
    # Half a surrogate pair is no text, but engines must not fail for it here.
    return text.encode("utf-8", "surrogatepass")
