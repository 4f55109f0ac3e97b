"""Requests as router and engine see them: prompts of token ids, or chats whose text they spell."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from hashlib import shake_128
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from octavo.study.workload import tokens_of
from octavo_engine.protocol import route_keys
from octavo_engine.server.routers.label_offsets import label_ids, label_text
from octavo_router.residency.api import CHAT
from octavo_router.routing.request import RouteRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.study.workload import Arrival, Prompt
    from octavo_engine.state.labels import Labels
    from octavo_router.residency.api import ScanFunction

TOKEN_BYTES = 4  # of text, as in English
POOL = "study"


class Prepared(NamedTuple):
    """One arrival, for the router and for whichever engine gets it."""

    request: RouteRequest
    tokens: list[int]
    labels: Callable[[], Labels | None]  # of the prompt; called once it is placed
    answer_labels: Callable[[], Labels | None]  # of prompt and answer; called once that is complete


class Shape(Protocol):
    def prepare(self, arrival: Arrival) -> Prepared: ...


@dataclass(slots=True)
class _Node:
    """A prompt's beginning: its keys, and the bytes after the last whole chunk."""

    keys: bytes  # of the chunks that end in its last part
    last_key: int
    rest: bytes


class TokenIds:
    """Prompts of token ids: 16 ids are a chunk. Keys are made once for each beginning.

    They stand for chats whose tokens are known: answers are labelled as those of chats are.
    """

    def __init__(self) -> None:
        empty = route_keys.canonical({"prompt": [0]}, kind="completion")
        assert empty is not None
        self._root = _Node(b"", empty.root, b"")
        self._nodes: dict[tuple[int, int, int], _Node] = {}

    def prepare(self, arrival: Arrival) -> Prepared:
        keys = self.keys(arrival.prompt)
        tokens = tokens_of(arrival.prompt)
        request = RouteRequest(
            model=POOL, pool=POOL, keys=keys, prompt_bytes=TOKEN_BYTES * len(tokens),
            prompt_tokens=len(tokens), max_tokens=len(arrival.answer), session=arrival.session,
            stream=True,
        )  # fmt: skip
        whole = (*arrival.prompt, arrival.answer)
        return Prepared(
            request, tokens, lambda: _label(keys), lambda: _label(self.keys(whole, keep=False))
        )

    def keys(self, prompt: Prompt, *, keep: bool = True) -> bytes:
        """As route_keys makes them of the whole prompt; of its last part anew if not to `keep`."""
        node = self._root
        parts = []
        for part in prompt:
            place = (id(node), part.start, part.stop)
            following = self._nodes.get(place)
            if following is None:
                following = _follow(node, part)
                if keep or part is not prompt[-1]:
                    self._nodes[place] = following
            node = following
            parts.append(node.keys)
        return b"".join(parts)


def _label(keys: bytes) -> Labels:
    return label_ids(route_keys.unpack_keys(keys))


def _follow(node: _Node, part: range) -> _Node:
    data = node.rest + struct.pack(f"<{len(part)}I", *part)
    keys = route_keys.chain(node.last_key, data)
    rest = data[route_keys.CHUNK_BYTES * len(keys) :]
    return _Node(route_keys.pack_keys(keys), keys[-1] if keys else node.last_key, rest)


class ChatText:
    """Chats: the router reads their JSON, knows bytes only, and learns what tokens they make.

    A token is four characters, so that a text's tokens are the workload's; what a template writes
    around it is a few tokens more. Each prompt is one message, so that no turn continues another's
    answer: only prompts are found again.
    """

    _BEFORE, _AFTER = "<|im_start|>user\nIt:", "<|im_end|>\n<|im_start|>assistant\n:"

    def __init__(self, scan: ScanFunction) -> None:
        self._scan = scan
        # Of the template: ids that no workload uses, as those count upwards from 0.
        top = 2**32
        self._lead = [*range(top - len(self._BEFORE) // TOKEN_BYTES, top)]
        first = self._lead[0]
        self._trail = [*range(first - len(self._AFTER) // TOKEN_BYTES, first)]

    def prepare(self, arrival: Arrival) -> Prepared:
        text = "".join(_spell(part) for part in arrival.prompt)
        body = {
            "model": POOL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": len(arrival.answer),
            "stream": True,
        }
        scan = self._scan(json.dumps(body).encode(), CHAT)
        request = RouteRequest(
            model=POOL, pool=POOL, keys=scan.keys, prompt_bytes=scan.prompt_bytes,
            max_tokens=scan.max_tokens, session=arrival.session, stream=scan.stream,
        )  # fmt: skip
        tokens = [*self._lead, *tokens_of(arrival.prompt), *self._trail]

        def labels() -> Labels | None:
            canonical = route_keys.canonical(body, kind="chat")
            assert canonical is not None
            rendered = f"{self._BEFORE}{text}{self._AFTER}".encode()
            ends = np.arange(1, len(tokens) + 1, dtype=np.int64) * TOKEN_BYTES
            names = route_keys.unpack_keys(scan.keys)
            return label_text(canonical, names, rendered, ends, merges=False)

        return Prepared(request, tokens, labels, lambda: None)


def _spell(part: range) -> str:
    """Of its first token on; one that is cut short begins like the whole."""
    seed = part.start.to_bytes(8, "little")
    return shake_128(seed).hexdigest(len(part) * TOKEN_BYTES // 2)
