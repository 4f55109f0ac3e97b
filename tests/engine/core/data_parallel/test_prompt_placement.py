"""Which core a request goes to, by what each was sent before and by what it has to do."""

from __future__ import annotations

from octavo_engine.core.data_parallel.prompt_placement import (
    MAX_TOKENS,
    SEQUENCE_TOKENS,
    CoreLoad,
    PromptRecord,
    choose_core,
    prompt_blocks,
)
from octavo_engine.state.adapter import AdapterRef
from octavo_engine.state.media import MediaSpan
from tests.fakes.requests import make_request


def blocks_of(tokens: list[int], **fields: object) -> list[bytes]:
    request = make_request(tokens, **fields)  # type: ignore[arg-type]
    return prompt_blocks(request, request.prompt_token_ids)


def test_an_idle_core_is_chosen_before_one_with_work() -> None:
    assert choose_core([CoreLoad(0, 1, 0), CoreLoad(1, 0, 0)]) == 1
    assert choose_core([CoreLoad(0, 1, 900), CoreLoad(1, 1, 100)]) == 1
    assert choose_core([CoreLoad(0, 2, 0), CoreLoad(1, 2, 0)]) == 0
    assert choose_core([CoreLoad(3, 1, 0), CoreLoad(2, 1, 0)]) == 2


def test_a_prefix_is_worth_its_tokens_in_work() -> None:
    held = 3 * SEQUENCE_TOKENS
    assert choose_core([CoreLoad(0, 2, 0, held), CoreLoad(1, 0, 0)]) == 0
    assert choose_core([CoreLoad(0, 4, 0, held), CoreLoad(1, 0, 0)]) == 1
    assert choose_core([CoreLoad(0, 0, held + 1, held), CoreLoad(1, 0, 0)]) == 1


def test_equal_blocks_are_equal_prefixes_and_nothing_else() -> None:
    tokens = list(range(100, 150))
    blocks = blocks_of(tokens)
    assert len(blocks) == 3
    assert blocks_of([*tokens[:40], 7]) == blocks[:2]
    assert blocks_of([7, *tokens[1:]]) != blocks
    assert blocks_of(tokens[:30], output=tokens[30:]) == blocks
    adapter = AdapterRef("a", "/a", "digest")
    picture = (MediaSpan(b"a" * 16, 20, 8),)
    other = (MediaSpan(b"b" * 16, 20, 8),)
    assert blocks_of(tokens, media=picture)[0] == blocks[0]
    named = [
        blocks_of(tokens, cache_salt="tenant"),
        blocks_of(tokens, adapter=adapter),
        blocks_of(tokens, media=picture),
        blocks_of(tokens, media=other),
    ]
    assert len({blocks[1], *(each[1] for each in named)}) == 5


def test_a_record_counts_what_it_has_from_the_first_block_on() -> None:
    record = PromptRecord(100)
    blocks = blocks_of(list(range(64)))
    assert record.num_held(blocks) == 0
    record.note(blocks)
    assert record.num_held(blocks) == 4
    assert record.num_held([*blocks[:2], b"other"]) == 2
    assert record.num_held([b"other", *blocks[1:]]) == 0
    record.clear()
    assert record.num_held(blocks) == 0


def test_a_record_forgets_the_oldest_prompts_from_their_ends() -> None:
    record = PromptRecord(6)
    old, new = blocks_of(list(range(64))), blocks_of(list(range(100, 164)))
    record.note(old)
    record.note(new)
    assert len(record) == 6
    assert record.num_held(new) == 4
    assert record.num_held(old) == 2
    record.note(old[:1])
    record.note(blocks_of(list(range(200, 216))))
    assert record.num_held(old) == 1


def test_only_the_beginning_of_a_long_prompt_is_named() -> None:
    tokens = [place % 1000 for place in range(MAX_TOKENS + 64)]
    blocks = blocks_of(tokens)
    assert len(blocks) == MAX_TOKENS // 16
    assert blocks_of([*tokens[:MAX_TOKENS], 7, 8]) == blocks
    late = (MediaSpan(b"a" * 16, MAX_TOKENS - 8, 32),)
    assert blocks_of(tokens, media=late)[:-1] == blocks[:-1]
    assert len(blocks_of(tokens, media=late)) == len(blocks)
    assert len(blocks_of(tokens, media=(MediaSpan(b"a" * 16, MAX_TOKENS + 8, 32),))) == len(blocks)
