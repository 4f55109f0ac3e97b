"""Log-probabilities in the two shapes that the two endpoints have for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from octavo_engine.core.text.logprobs import DecodedLogprobs, TokenChoice

FLOOR = -9999.0  # JSON has no -Infinity


def chat_logprobs(entries: Sequence[DecodedLogprobs], *, as_ids: bool) -> dict[str, Any]:
    return {
        "content": [
            {
                **_chat_entry(entry, as_ids=as_ids),
                "top_logprobs": [_chat_entry(choice, as_ids=as_ids) for choice in entry.top],
            }
            for entry in entries
        ]
    }


def completion_logprobs(
    entries: Iterable[DecodedLogprobs | None],
    offsets: Iterable[int],
    *,
    as_ids: bool,
    first: str = "",
) -> dict[str, Any]:
    """Parallel arrays. An entry None is the first prompt token, of which only the text is known."""
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        if entry is None:
            tokens.append(first)
            values.append(None)
            tops.append(None)
            continue
        tokens.append(_name(entry, as_ids=as_ids))
        values.append(_floored(entry.logprob))
        top = {_name(choice, as_ids=as_ids): _floored(choice.logprob) for choice in entry.top}
        top.setdefault(_name(entry, as_ids=as_ids), _floored(entry.logprob))
        tops.append(top)
    return {
        "text_offset": list(offsets),
        "token_logprobs": values,
        "tokens": tokens,
        "top_logprobs": tops,
    }


def prompt_logprobs(entries: Iterable[DecodedLogprobs | None]) -> list[dict[str, Any] | None]:
    """One entry a prompt token: every alternative and the token itself, by id."""
    return [None if entry is None else _by_id(entry) for entry in entries]


def _by_id(entry: DecodedLogprobs) -> dict[str, Any]:
    known: dict[str, Any] = {}
    choices: list[DecodedLogprobs | TokenChoice] = [entry, *entry.top]
    for choice in choices:
        known[str(choice.token_id)] = {
            "logprob": _floored(choice.logprob),
            "rank": choice.rank,
            "decoded_token": choice.text,
        }
    return known


def _chat_entry(choice: DecodedLogprobs | TokenChoice, *, as_ids: bool) -> dict[str, Any]:
    return {
        "token": _name(choice, as_ids=as_ids),
        "logprob": _floored(choice.logprob),
        "bytes": list(choice.bytes),
    }


def _name(choice: DecodedLogprobs | TokenChoice, *, as_ids: bool) -> str:
    return f"token_id:{choice.token_id}" if as_ids else choice.text


def _floored(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR
