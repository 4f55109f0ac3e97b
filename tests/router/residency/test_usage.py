"""Token counts at the end of an answer: what is found, and that both twins find the same."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo_router.residency import native, usage

fast = native.load().find_usage
FINDERS = [pytest.param(usage.find_usage, id="python"), pytest.param(fast, id="compiled")]

CHAT = b"""{"choices":[{"message":{"content":"as \\"usage\\":{\\"prompt_tokens\\":9}"}}],
"usage": {"prompt_tokens": 290, "completion_tokens" : 8, "total_tokens": 298,
"prompt_tokens_details": {"cached_tokens": 256}}}"""


@pytest.mark.parametrize("find", FINDERS)
def test_the_last_usage_object_counts(find):
    assert find(CHAT) == (290, 8, 256)
    assert find(b'{"usage":{"prompt_tokens":1}}' + CHAT) == (290, 8, 256)
    assert find(b'"usage":{"input_tokens":7,"output_tokens":0}') == (7, 0, None)
    assert find(b'"usage":null') == find(b"") == (0, 0, None)


@pytest.mark.parametrize("find", FINDERS)
def test_a_number_is_bounded_and_so_is_the_object(find):
    assert find(b'"usage":{"prompt_tokens":1234567890123}') == (123456789012, 0, None)
    assert find(b'"usage":{"prompt_tokens":-5,"cached_tokens":"7"}') == (0, 0, None)
    far = b'"usage":{' + b" " * 1024 + b'"prompt_tokens":5}'
    assert find(far) == (0, 0, None)


pieces = st.lists(
    st.sampled_from(
        [
            b'"usage":', b'"prompt_tokens"', b'"completion_tokens"', b'"cached_tokens"',
            b'"input', b'_tokens"', b'"output_tokens"', b":", b" ", b"\n\t\x0b", b'"', b"{", b"}",
            b",",
            b"12", b"3456789012345", b"-1", b"\x00", b"\x1c", b"x" * 300, b"prompt",
        ]
    ),
    max_size=40,
).map(b"".join)  # fmt: skip


@settings(max_examples=400, derandomize=True, deadline=None)
@given(pieces)
@example(b'"usage":' + b" " * 998 + b'"prompt_tokens":123456')
def test_both_twins_find_the_same(answer):
    assert fast(answer) == usage.find_usage(answer)
