"""What vLLM's engines receive so that one computes a prompt and another goes on with its KV cache.

The first is sent a request for one token and to keep the cache (`do_remote_decode`); its response
says where it lies (`kv_transfer_params`), and with that in its request the second fetches it. The
router reads none of it. These are the fields of vLLM's NIXL connector. Its Mooncake connector uses
others: there a router names the transfer and the engine that computes, whose response says nothing.

Two engines of ours are sent the request at once: the first one's address is known, and the second
fetches the blocks as they are computed (`remote_is_computing`).
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final

import msgspec

from octavo_router.errors import RouterError
from octavo_router.proxy.streams import end_of_plain
from octavo_router.routing.outcome import AttemptResult

if TYPE_CHECKING:
    from octavo_router.routing.request import RouteRequest

_FIELD: Final = "kv_transfer_params"
_KEEP: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_COMPUTING: Final = {"do_remote_prefill": True, "remote_is_computing": True}
_ONE_ANSWER: Final = ("n", "best_of")
_SPACE: Final = b" \t\r\n"
_MAX_OPENING_BYTES: Final = 64 * 2**10


class NotHandedOver(RouterError):
    """The engine answered, but said not where its cache is."""


class Opening(Enum):
    """What the first bytes of a stream say."""

    NOTHING = auto()  # yet
    ANSWERS = auto()
    FAILED = auto()  # before it has said anything


class _Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


def prompt_question(body: bytes, request: RouteRequest) -> bytes | None:
    """The body for the engine that computes the prompt; None where one engine must do it all."""
    if request.num_answers > 1 or request.max_tokens == 1:
        return None
    try:
        fields: dict[str, Any] = msgspec.json.decode(body, type=dict)
    except (ValueError, RecursionError):
        return None  # the engine will say what is wrong with it
    if (
        fields.get(_FIELD) is not None
        or fields.get("echo")
        or fields.get("use_beam_search")  # the connector knows nothing of its many short runs
        or fields.get("prompt_logprobs") is not None  # those are the answering engine's to tell
        or any(fields.get(name) not in (None, 1) for name in _ONE_ANSWER)
        or _num_prompts(fields.get("prompt")) > 1
    ):
        return None
    fields |= {_FIELD: _KEEP, "stream": False, "max_tokens": 1}
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = 1
    for name in ("stream_options", "min_tokens"):
        fields.pop(name, None)
    return msgspec.json.encode(fields)


def with_cache(body: bytes, answer: bytes) -> bytes:
    """The client's body, with where the prompt's cache lies. Raises NotHandedOver."""
    try:
        where = bytes(msgspec.json.decode(answer, type=_Answer).kv_transfer_params)
    except (ValueError, RecursionError) as error:
        raise NotHandedOver(f"its answer cannot be read: {error}") from None
    if not where.startswith(b"{"):
        raise NotHandedOver(f"its answer has no {_FIELD}; is it started with a KV connector?")
    return _with_field(body, where)


def with_engine(body: bytes, address: str) -> bytes:
    """The client's body, with the engine of ours that is computing its prompt now."""
    host, _, port = address.rpartition(":")
    where = _COMPUTING | {"remote_host": host.strip("[]"), "remote_port": int(port)}
    return _with_field(body, msgspec.json.encode(where))


def _with_field(body: bytes, where: bytes) -> bytes:
    return b'%b,"%b":%b}' % (body.rstrip(_SPACE)[:-1], _FIELD.encode(), where)


def opening_of(data: bytes) -> Opening:
    """Of what an engine streams first, where it has to fetch the cache before it can answer.

    One that cannot says 200 nevertheless, in chats even who will speak, and only then that it
    failed.
    """
    whole = data[: data.rfind(b"\n\n") + 2] if b"\n\n" in data else b""
    if end_of_plain(whole).result is AttemptResult.ERROR_5XX:
        return Opening.FAILED
    num_events = sum(line.startswith(b"data:") for line in whole.splitlines())
    is_role_alone = num_events == 1 and b'"role":' in whole
    if (num_events == 0 or is_role_alone) and len(data) <= _MAX_OPENING_BYTES:
        return Opening.NOTHING
    return Opening.ANSWERS


def _num_prompts(prompt: Any) -> int:
    """A list of texts, or of lists of tokens, is several."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1
