"""From tokens to segments, from files to sections, and the texts that are written of them."""

from __future__ import annotations

import numpy as np
import pytest

from octavo_engine.speech import transcript
from octavo_engine.speech.languages import LANGUAGES, language_code
from octavo_engine.speech.mel import SAMPLE_RATE
from octavo_engine.speech.transcript import DecodedWindow, Segment, SpeechTokens

FIRST = 1000
TOKENS = SpeechTokens(
    start=901, end=900, transcribe=902, translate=903, no_speech=904, no_timestamps=FIRST - 1,
    previous=905, languages={"en": 910, "de": 911},
)  # fmt: skip
NO_LANGUAGES = TOKENS._replace(languages={})


def said(
    *tokens: int, text: str = "some text", logprob: float = -0.3, silence: float = 0.0
) -> DecodedWindow:
    return DecodedWindow(list(tokens), text, logprob, 0.0, silence)


def at(seconds: float) -> int:
    return FIRST + round(seconds / 0.02)


def decode(tokens: list[int]) -> str:
    return "".join(f" w{token}" for token in tokens)


def cut(
    answer: DecodedWindow, *, seek: int = 0, frames: int = 3000
) -> tuple[list[tuple[float, float, str]], int]:
    segments, following = transcript.cut_segments(
        answer, TOKENS, seek=seek, frames=frames, decode=decode
    )
    return [(round(s.start, 2), round(s.end, 2), s.text) for s in segments], following


def test_whole_pairs_are_segments_and_the_next_window_begins_behind_the_last() -> None:
    answer = said(at(0), 1, 2, at(2.5), at(2.5), 3, at(4), at(4), 4)
    assert cut(answer, seek=500) == ([(5.0, 7.5, " w1 w2"), (7.5, 9.0, " w3")], 900)


def test_a_single_time_at_the_end_says_that_nothing_follows() -> None:
    answer = said(at(0), 1, at(2), at(3), 2, at(4))
    assert cut(answer) == ([(0.0, 2.0, " w1"), (3.0, 4.0, " w2")], 3000)


def test_without_a_pair_the_window_is_one_segment() -> None:
    assert cut(said(at(0.5), 1, 2, at(6))) == ([(0.5, 6.0, " w1 w2")], 3000)
    assert cut(said(at(0), 1, 2), frames=700) == ([(0.0, 7.0, " w1 w2")], 700)


def test_segments_without_text_are_left_out() -> None:
    answer = said(at(0), at(0), 5, at(2), at(2))
    assert cut(answer)[0] == [(0.0, 2.0, " w5")]
    assert cut(said()) == ([], 3000)


def test_times_that_do_not_move_on_cannot_hold_the_file_up() -> None:
    assert cut(said(at(0), at(0), at(0)))[1] == 3000


def test_prompts() -> None:
    make = transcript.prompt_tokens
    assert make(TOKENS, language="de", translates=True) == [901, 911, 903]
    assert make(NO_LANGUAGES, language="en", translates=False, previous=[7, 8]) == [905, 7, 8, 901]
    long = make(TOKENS, language="en", translates=False, previous=range(800), max_length=448)
    assert long == [905, *range(577, 800), 901, 910, 902]


def test_doubt_and_silence() -> None:
    assert not transcript.is_doubtful(said(1))
    assert transcript.is_doubtful(said(1, logprob=-1.1))
    assert transcript.is_doubtful(said(1, text="again and " * 30))
    quiet = said(1, logprob=-1.1, silence=0.7)
    assert transcript.is_silence(quiet) and not transcript.is_doubtful(quiet)
    assert not transcript.is_silence(said(1, silence=0.7))


def test_special_tokens_are_found_by_name() -> None:
    names = {"<|startoftranscript|>": 1, "<|endoftext|>": 2, "<|transcribe|>": 3,
             "<|translate|>": 4,
             "<|nocaptions|>": 5, "<|notimestamps|>": 6, "<|startofprev|>": 7,
             "<|en|>": 8}  # fmt: skip
    found = transcript.find_tokens(names.get, 51864)
    assert found == SpeechTokens(1, 2, 3, 4, 5, 6, 7, {})
    assert found.first_timestamp == 7
    assert transcript.find_tokens(names.get, 51865).languages == {"en": 8}
    with pytest.raises(KeyError, match="startofprev"):
        transcript.find_tokens({k: v for k, v in names.items() if v != 7}.get, 51864)


def test_long_files_are_cut_where_it_is_quiet() -> None:
    rng = np.random.default_rng(1)
    samples = rng.normal(0, 0.1, 700 * SAMPLE_RATE).astype(np.float32)
    for second in (290, 591):
        samples[second * SAMPLE_RATE : (second + 1) * SAMPLE_RATE] = 0
    sections = transcript.cut_sections(samples)
    assert np.array_equal(np.concatenate(sections), samples)
    ends = np.cumsum([len(section) for section in sections]) / SAMPLE_RATE
    assert len(ends) == 3 and 290 < ends[0] < 291 and 591 < ends[1] < 592
    assert len(transcript.cut_sections(samples[: 320 * SAMPLE_RATE])) == 1


def test_subtitles() -> None:
    segments = [Segment(0.0, 2.5, [], " One --> two"), Segment(3599.9996, 3661.5, [], " Three")]
    assert transcript.srt(segments) == (
        "1\n00:00:00,000 --> 00:00:02,500\nOne -> two\n\n2\n01:00:00,000 --> 01:01:01,500\nThree\n"
    )
    assert transcript.vtt(segments) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nOne -> two\n\n"
        "01:00:00.000 --> 01:01:01.500\nThree\n"
    )


def test_languages_by_code_and_name() -> None:
    assert len(LANGUAGES) == 100
    assert (language_code("DE"), language_code("Haitian Creole"), language_code("xx")) == (
        "de", "ht", None
    )  # fmt: skip
