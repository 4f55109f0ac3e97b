"""From route keys to labels: how many tokens each prefix of a request's data stands for.

    data (route_keys)     |..message..|.. text of a message ..|..message..|..
                          0    64    128   192   256                        key i ends at 64 (i + 1)
    rendered prompt           <|im_start|>user\\n text of a message <|im_end|>\\n ...
    tokens                    |   |   | |  |     |  |    |     |

Texts of messages are searched in the rendered prompt one after another, so a place in the data has
a place in the prompt: exact inside a text, between two texts a range. Token ends come from adding
up how many bytes each token spells. All of it is arithmetic on arrays; nothing here looks at a
token one by one.

Of a prompt that shares exactly i chunks with one that is cached, between `low` tokens (those that
chunk i ends after, less one that may merge with what follows) and `high` tokens (those before the
end of chunk i + 1) are found. Where that is more than a block apart, the label's number lies
between, within a block of either.

A picture is a place in the data (its digest, padded to the end of a chunk) and one placeholder in
the rendered prompt, whose tokens all end where the placeholder ends. A template may write pictures
before the texts that came before them: a key that does not cover a picture counts no token behind
the picture's placeholder. Another request whose message goes on with a picture or a text that its
template writes before finds less than is said.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo_engine.config import BLOCK_SIZE
from octavo_engine.protocol.route_keys import CHUNK_BYTES, FIELD, MEDIA, opening_end
from octavo_engine.state.labels import Labels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from octavo_engine.core.media.prompt import PicturePlace
    from octavo_engine.protocol.route_keys import Canonical, Span
    from octavo_engine.tokenization.tokenizer import Tokenizer

_ENTRY = np.dtype([("name", "<u8"), ("tokens", "<u4")])
_MAX_SLACK = 64  # bytes by which tokens may spell more or less than the text; else nothing is known


class TokenEnds:
    """Where each token of a prompt ends in its text, in bytes."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._lengths = np.full(vocab_size, -1, np.int32)  # filled in as tokens are met

    def __call__(
        self, ids: Sequence[int], text: bytes, *,
        whole: bool = True, pictures: Sequence[PicturePlace] = (),
    ) -> NDArray[np.int64]:  # fmt: skip
        """Never too early: a token that ends at or before a place lies before it for certain.

        With `whole` false the ids are only the beginning of the text's. All tokens of a picture
        stand for one placeholder in the text. Empty where tokens and text do not fit together.
        """
        tokens = np.array(ids, np.int64)
        if len(tokens) == 0:
            return tokens
        lengths = self._lengths[tokens]
        if lengths.min() < 0:
            self._learn(tokens[lengths < 0])
            lengths = self._lengths[tokens]
        # Added around any text, and not part of this one.
        if ids[0] == self._tokenizer.bos_token_id and not text.startswith(self._spelling(ids[0])):
            lengths[0] = 0
        for place in pictures:
            lengths[place.first] = len(self._tokenizer.token_bytes(place.placeholder))
            lengths[place.first + 1 : place.end] = 0
        ends = np.cumsum(lengths, dtype=np.int64)
        if not whole:
            return ends
        # A vocabulary may spell spaces that the text does not have (each token then ends a little
        # earlier than it seems: still safe), or a normaliser may have taken some away.
        surplus = int(ends[-1]) - len(text)
        if abs(surplus) > _MAX_SLACK:
            return ends[:0]
        return ends if surplus >= 0 else ends - surplus

    def _spelling(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token) or b"\xff"

    def _learn(self, tokens: NDArray[np.int64]) -> None:
        for token in np.unique(tokens).tolist():
            self._lengths[token] = len(self._tokenizer.token_bytes(token))


class Pictures(NamedTuple):
    """Where each placeholder begins and ends in the rendered prompt."""

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


def place_pictures(
    canonical: Canonical, ends: NDArray[np.int64], spans: Sequence[PicturePlace]
) -> Pictures | None:
    """None where the data has other parts than these pictures: which is which is not known."""
    if len(spans) != len(canonical.media) or len(ends) == 0:
        return None
    before = np.concatenate((np.zeros(1, np.int64), ends))
    first, last = [span.first for span in spans], [span.end - 1 for span in spans]
    return Pictures(before[first], ends[last])


class Places(NamedTuple):
    """Places in the data as places in the prompt: certain before `low`, possible before `high`."""

    low: NDArray[np.int64]
    high: NDArray[np.int64]
    opening: int  # where the first text or picture begins
    num_known: int  # of the places; none after them is known
    is_whole: bool  # all texts were found


def label_ids(keys: Sequence[int]) -> Labels:
    """Of a prompt of token ids: 16 ids are a chunk of the data, and a block."""
    count = len(keys)
    entries = np.empty(count, _ENTRY)
    entries["name"] = keys
    entries["tokens"] = np.arange(1, count + 1, dtype=np.uint32) * BLOCK_SIZE
    return Labels(entries.tobytes(), np.arange(count, dtype=np.uint32).tobytes())


def label_text(
    canonical: Canonical,
    names: Sequence[int],
    text: bytes,
    ends: NDArray[np.int64],
    *,
    merges: bool = True,
    num_found: int | None = None,
    first_block: int = 0,
    pictures: Pictures | None = None,
) -> Labels | None:
    """Labels for `names`: what comes before the first part, then the keys of all whole chunks.

    `ends` are the ends of the tokens in `text`, the rendered prompt. `num_found` is how many of
    them can be found cached; default: all but the last, which is always computed. Labels on blocks
    before `first_block` are left out.
    """
    if len(ends) == 0:
        return None
    if num_found is None:
        num_found = len(ends) - 1
    places = locate(canonical, len(names) - 1, text, pictures)
    count = places.num_known + 1
    low_at = np.concatenate(([places.opening], places.low[: count - 1]))
    high_at = np.append(places.high[: count - 1], len(text) if places.is_whole else low_at[-1])
    within = int(np.searchsorted(low_at, ends[-1], "right"))
    if within < count:  # tokens beyond are not known: what is found of them lies before
        count, low_at, high_at = within, low_at[:within], high_at[:within]
        if count == 0:
            return None
        high_at[-1] = ends[-1]
    low = np.searchsorted(ends, low_at, "right") - (1 if merges else 0)
    low = np.minimum(np.maximum(np.maximum.accumulate(low), 0), num_found)
    high = np.minimum(np.maximum(np.searchsorted(ends, high_at, "right"), low), num_found)
    if canonical.form == "text":  # nothing is written before a prompt that is no chat
        high[0] = low[0] = 0
    return _hang(np.array(names[:count], np.uint64), low, high, first_block)


def _hang(
    names: NDArray[np.uint64], low: NDArray[np.int64], high: NDArray[np.int64], first_block: int
) -> Labels:
    """Each name on the last full block before `low`; on first blocks where there is none."""
    num_blocks = low // BLOCK_SIZE
    floor = num_blocks * BLOCK_SIZE
    middle = np.minimum(np.maximum(high - BLOCK_SIZE, low), low + BLOCK_SIZE)
    middle[0] = low[0]  # most chats that begin alike have different texts
    tokens = np.minimum(middle, np.where(num_blocks > 0, floor, low) + BLOCK_SIZE)
    blocks = np.maximum(num_blocks - 1, 0)
    # Where many tokens are uncertain, more can be said while the block after is cached too.
    wide = (num_blocks > 0) & (middle > tokens)
    useful = (tokens > 0) & ((low > 0) | (high > BLOCK_SIZE))
    # A block that no name hangs on would be held by nobody: the next name says what it is worth.
    is_bare = np.ones(int(num_blocks[-1]) + 1, np.bool_)
    is_bare[num_blocks] = False
    steps = np.flatnonzero(is_bare[1:])
    owners = np.searchsorted(low, (steps + 1) * BLOCK_SIZE)
    names = np.concatenate((names[useful], names[owners], names[wide]))
    tokens = np.concatenate((tokens[useful], (steps + 1) * BLOCK_SIZE, middle[wide]))
    blocks = np.concatenate((blocks[useful], steps, num_blocks[wide]))
    order = np.lexsort((tokens, blocks))
    order = order[np.searchsorted(blocks[order], first_block) :]
    entries = np.empty(len(order), _ENTRY)
    entries["name"] = names[order]
    entries["tokens"] = tokens[order]
    return Labels(entries.tobytes(), blocks[order].astype(np.uint32).tobytes())


def locate(
    canonical: Canonical, num_chunks: int, text: bytes, pictures: Pictures | None = None
) -> Places:
    """Where the ends of the data's chunks lie in the rendered prompt."""
    data = canonical.data
    starts, ends, places = _find_texts(canonical.spans, data, text)
    at = np.arange(1, num_chunks + 1, dtype=np.int64) * CHUNK_BYTES
    is_whole = len(starts) == len(canonical.spans)
    if not is_whole:
        limit = canonical.spans[len(starts)].start
        at = at[at <= limit]
    sealed_messages = _sealed_messages(canonical)
    if not starts:
        empty = np.zeros(len(at), np.int64)
        if pictures is None or not is_whole:
            return Places(empty, empty, 0, len(at), is_whole)
        low = _behind_pictures(
            empty, at, canonical, pictures, empty[:0], empty[:0], sealed_messages
        )
        return Places(low, np.full(len(at), len(text)), 0, len(at), is_whole)
    start, end, place = (np.array(x, np.int64) for x in (starts, ends, places))
    place_end = place + end - start
    found = canonical.spans[: len(starts)]
    sealed = np.array([span.message in sealed_messages for span in found], np.bool_)
    # What lies between texts: behind the last one that is complete, and before the next.
    number = np.searchsorted(start, at, "right") - 1
    known = np.maximum(number, 0)
    inside = (number >= 0) & (at <= end[known]) & ~sealed[known]
    exact = place[known] + at - start[known]
    # Of a message with more than its text nothing is complete before the next one begins.
    complete = np.maximum.accumulate(np.where(sealed, -1, np.arange(len(start))))
    last = np.where(number >= 0, complete[known], -1)
    behind = np.where(last >= 0, place_end[np.maximum(last, 0)], 0)
    after = np.append(place[1:], len(text) if is_whole else place_end[-1])
    before = np.where(number >= 0, after[known], place[0])
    low, high = np.where(inside, exact, behind), np.where(inside, exact, before)
    opening = int(place[0]) if not sealed[0] else 0
    if pictures is None:
        return Places(low, high, opening, len(at), is_whole)
    at = np.concatenate(([opening_end(canonical)], at))
    low = np.concatenate(([opening], low))
    if is_whole:  # else a text that was not found may stand before any picture
        text_ends = np.array([_complete_at(canonical, span, sealed_messages) for span in found])
        low = _behind_pictures(low, at, canonical, pictures, place, text_ends, sealed_messages)
    uncovered = _uncovered(at, canonical, pictures)
    low = np.minimum(low, uncovered)
    high = np.maximum(np.minimum(high, uncovered[1:]), low[1:])
    return Places(low[1:], high, int(low[0]), len(at) - 1, is_whole)


def _behind_pictures(
    low: NDArray[np.int64], at: NDArray[np.int64], canonical: Canonical, pictures: Pictures,
    places: NDArray[np.int64], text_ends: NDArray[np.int64], sealed: set[int],
) -> NDArray[np.int64]:  # fmt: skip
    """Behind the last picture that the data up to `at` has, if it has all texts that stand before
    that one too."""
    for span, start, end in zip(canonical.media, pictures.starts, pictures.ends, strict=True):
        texts_before = text_ends[places < start]
        needed = max(_complete_at(canonical, span, sealed), int(texts_before.max(initial=0)))
        low = np.where(at >= needed, np.maximum(low, end), low)
    return low


def _uncovered(
    at: NDArray[np.int64], canonical: Canonical, pictures: Pictures
) -> NDArray[np.int64]:
    """Where the first picture begins that the data up to each place has not."""
    first = np.full(len(at), np.iinfo(np.int64).max)
    for span, start in zip(canonical.media, pictures.starts, strict=True):
        first = np.where(at < span.end, np.minimum(first, start), first)
    return first


def _complete_at(canonical: Canonical, span: Span, sealed: set[int]) -> int:
    """Where the data has all that may be rendered before this part's end."""
    if span.message not in sealed:
        return span.end
    later = [p.start for p in (*canonical.spans, *canonical.media) if p.message > span.message]
    return min(later, default=len(canonical.data) + 1)


def _find_texts(
    spans: Sequence[Span], data: bytes, text: bytes
) -> tuple[list[int], list[int], list[int]]:
    """Begin and end of each text in the data, as the template keeps it, and its place in `text`.

    One after another, each at its first possible place: no text is ever placed behind where it
    really is, so that nothing is promised too early. Ends at the first one that is not there.
    """
    starts: list[int] = []
    ends: list[int] = []
    places: list[int] = []
    position = 0
    for span in spans:
        start, end = span.start, span.end
        content = data[start:end]
        place = text.find(content, position)
        if place < 0:  # most templates that change a text trim it
            trimmed = content.strip()
            place = text.find(trimmed, position)
            if place < 0:
                break
            start += content.find(trimmed)
            end = start + len(trimmed)
        starts.append(start)
        ends.append(end)
        places.append(place)
        position = place + end - start
    return starts, ends, places


def _sealed_messages(canonical: Canonical) -> set[int]:
    """Messages with fields besides their text: these may be rendered before it."""
    data = canonical.data
    if FIELD not in data:
        return set()
    parts = sorted((*canonical.spans, *canonical.media))
    starts = [part.start for part in parts]
    messages: set[int] = set()
    position = data.find(FIELD)
    while position >= 0:
        owner = bisect_right(starts, position) - 1
        if owner >= 0 and not _is_digest(parts[owner], data, position):
            messages.add(parts[owner].message)
        position = data.find(FIELD, position + 1)
    return messages


def _is_digest(part: Span, data: bytes, position: int) -> bool:
    """Whether a byte lies in the digest of a part that is no text: it is no mark there."""
    return position < part.end and data[part.start : part.start + 1] == MEDIA
