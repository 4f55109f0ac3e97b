"""One file through the engine: window after window, each tried at rising temperatures."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo_engine.core.text.output_stream import OutputSink
from octavo_engine.core.text.submission import Submission
from octavo_engine.errors import DeadlineExceeded, InvalidRequest
from octavo_engine.speech import alignment, transcript
from octavo_engine.speech.mel import HOP, feature_rows, log_mel
from octavo_engine.speech.transcript import DecodedWindow, Segment
from octavo_engine.state.audio import AudioWindow, TranscriptRules
from octavo_engine.state.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from numpy.typing import NDArray

    from octavo_engine.core.info import SpeechInfo
    from octavo_engine.core.text.outputs import CompletionOutput, RequestOutput
    from octavo_engine.server.served_engine import ServedEngine
    from octavo_engine.speech.alignment import Word
    from octavo_engine.speech.transcript import SpeechTokens
    from octavo_engine.tokenization.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True)
class TranscriptJob:
    """What a request wants of a file, and what is counted of it."""

    request_id: str
    group: str
    translates: bool
    language: str | None  # None: found out from the first window
    prompt: str
    temperature: float | None
    has_words: bool = False  # each with its times
    priority: int = 0
    deadline_at: float | None = None  # of the whole file, on the monotonic clock
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    def time_left_s(self, now: float) -> float | None:
        """For all that is still to be said of the file. Raises DeadlineExceeded."""
        if self.deadline_at is None:
            return None
        if now >= self.deadline_at:
            raise DeadlineExceeded("The file was not transcribed within the request's time limit.")
        return self.deadline_at - now


class _Choice(NamedTuple):
    """An answer of the engine."""

    token_ids: list[int]
    logprobs: list[float]


class Transcriber:
    """Files of one job."""

    def __init__(self, engine: ServedEngine, job: TranscriptJob) -> None:
        info = engine.info
        assert info.speech is not None, "the model reads audio"
        self._engine = engine
        self._speech: SpeechInfo = info.speech
        self._job = job
        self.tokens = speech_tokens(engine.tokenizer, info.vocab_size)
        if job.language is not None and not self._knows(job.language):
            raise InvalidRequest(
                f"language {job.language} is not one of this model's; it knows "
                f"{', '.join(self.tokens.languages) or 'en'}",
                param="language",
            )
        if job.translates and not self.tokens.languages:
            raise InvalidRequest(
                "this model transcribes English only; it cannot translate", param="model"
            )
        if job.has_words and not info.speech.num_aligned_heads:
            raise InvalidRequest(
                "this model gives words no times; leave word out", param="timestamp_granularities"
            )

    async def run(
        self, samples: NDArray[np.float32], offset_s: float = 0.0
    ) -> AsyncGenerator[list[Segment], None]:
        """The segments of each window, in their order."""
        job, speech = self._job, self._speech
        num_frames = -(-len(samples) // HOP)
        context = self._encoded(f" {job.prompt.strip()}") if job.prompt.strip() else []
        seek = 0
        while seek < num_frames:
            own = samples[seek * HOP : (seek + speech.num_frames) * HOP]
            window = await asyncio.to_thread(make_window, own, speech)
            if job.language is None:
                job.language = await self._find_language(window)
            said = await self._say(window, context)
            frames = min(speech.num_frames, num_frames - seek)
            if transcript.is_silence(said):
                seek += frames
                continue
            segments, following = transcript.cut_segments(
                said, self.tokens, seek=seek, frames=frames, decode=self._decoded
            )
            if said.temperature > transcript.PROMPT_RESET_TEMPERATURE:
                context = []
            else:
                context += [t for s in segments for t in s.tokens if t < self.tokens.end]
            if job.has_words and segments:
                segments = await self._with_words(window, segments, frames)
            seek = following
            if segments:
                yield [
                    s._replace(
                        start=s.start + offset_s,
                        end=min(s.end, num_frames / 100) + offset_s,
                        seek=s.seek + round(100 * offset_s),
                        words=tuple(
                            w._replace(start=w.start + offset_s, end=w.end + offset_s)
                            for w in s.words
                        ),
                    )
                    for s in segments
                ]

    async def _say(self, window: AudioWindow, context: list[int]) -> DecodedWindow:
        """At the first temperature that gives no doubt; of doubtful answers the last one."""
        job = self._job
        temperatures = transcript.TEMPERATURES if job.temperature is None else (job.temperature,)
        prompt = transcript.prompt_tokens(
            self.tokens, language=job.language or "en", translates=job.translates,
            previous=context, max_length=self._engine.info.max_model_len,
        )  # fmt: skip
        silence = asyncio.ensure_future(self._no_speech(window))
        try:
            for temperature in temperatures:
                answer = await self._ask(window, prompt, temperature)
                tokens = [t for t in answer.token_ids if t != self.tokens.end]
                text = self._decoded([t for t in tokens if t < self.tokens.end])
                count = len(tokens) + 1
                said = DecodedWindow(
                    tokens, text.strip(), sum(answer.logprobs) / count, temperature, await silence
                )
                if not transcript.is_doubtful(said):
                    break
        finally:
            silence.cancel()
        return said

    async def _with_words(
        self, window: AudioWindow, segments: list[Segment], frames: int
    ) -> list[Segment]:
        """The segments of a window with their words, each where the decoder attends to the sound
        while it says the word again."""
        tokens, job = self.tokens, self._job
        texts = [[t for t in segment.tokens if t < tokens.end] for segment in segments]
        opening = transcript.prompt_tokens(
            tokens, language=job.language or "en", translates=job.translates
        )
        spoken = [token for text in texts for token in text]
        most = self._engine.info.max_model_len - len(opening) - 3
        if not spoken or len(spoken) > most:
            return segments
        num_rows = max(1, frames // 2)
        params = SamplingParams(
            temperature=0.0, max_tokens=1, detokenize=False, ignore_eos=True, prompt_logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        prompt = [*opening, tokens.no_timestamps, *spoken, tokens.end]
        aligned = AudioWindow(window.digest, window.features, aligned_rows=num_rows)
        output = await self._submit(aligned, prompt, params)
        entries = list(output.prompt_logprobs or ())[1:]

        def placed() -> list[Segment]:
            attention = np.stack(
                [np.frombuffer(entry.attention, np.float16) for entry in entries if entry]
            ).reshape(len(entries), -1, num_rows)
            rows = alignment.token_rows(attention.astype(np.float32), first=len(opening))
            return [
                segment._replace(words=tuple(words))
                for segment, words in zip(
                    segments, self._placed(texts, rows, segments), strict=True
                )
            ]

        return await asyncio.to_thread(placed)

    def _placed(
        self, texts: list[list[int]], rows: NDArray[np.int64], segments: list[Segment]
    ) -> list[list[Word]]:
        """The words of each segment. `rows`: where the tokens of all of them begin."""
        begin_s, first, found = segments[0].seek / 100, 0, []
        for text in texts:
            words = alignment.split_words(text, self._decoded, self._job.language or "en")
            own = rows[first : first + len(text) + 1]
            found.append(alignment.place_words(words, own, begin_s))
            first += len(text)
        return found

    async def _ask(self, window: AudioWindow, prompt: list[int], temperature: float) -> _Choice:
        tokens, info = self.tokens, self._engine.info
        rules = TranscriptRules(
            end_of_text=tokens.end,
            first_timestamp=tokens.first_timestamp,
            no_timestamps=tokens.no_timestamps,
            max_initial_timestamp=transcript.MAX_INITIAL_TIMESTAMP,
            suppressed=(
                *self._speech.suppressed, tokens.start, tokens.previous, tokens.no_speech,
                tokens.transcribe, tokens.translate, *tokens.languages.values(),
            ),
            suppressed_at_begin=self._speech.suppressed_at_begin,
        )  # fmt: skip
        params = SamplingParams(
            temperature=temperature,
            max_tokens=max(1, min(info.max_model_len // 2, info.max_model_len - len(prompt))),
            logprobs=0,
            detokenize=False,
            stop_token_ids=(tokens.end,),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        return await self._generate(window, prompt, params, rules)

    async def _no_speech(self, window: AudioWindow) -> float:
        """How likely it is that nothing is said."""
        params = SamplingParams(
            temperature=0.0, max_tokens=1, detokenize=False, ignore_eos=True,
            logprob_token_ids=(self.tokens.no_speech,), output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        output = await self._deliver(window, [self.tokens.start], params, None)
        entries = list(output.logprobs or ())
        found = [c.logprob for c in entries[0].top if c.token_id == self.tokens.no_speech]
        return math.exp(found[0]) if found else 0.0

    async def _find_language(self, window: AudioWindow) -> str:
        if not self.tokens.languages:
            return "en"
        codes = {token: code for code, token in self.tokens.languages.items()}
        params = SamplingParams(
            temperature=0.0, max_tokens=1, detokenize=False, ignore_eos=True,
            allowed_token_ids=tuple(codes), output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        answer = await self._deliver(window, [self.tokens.start], params, None)
        return codes[answer.token_ids[0]]

    async def _generate(
        self,
        window: AudioWindow,
        prompt: list[int],
        params: SamplingParams,
        rules: TranscriptRules,
    ) -> _Choice:
        output = await self._deliver(window, prompt, params, rules)
        self._job.num_prompt_tokens += len(prompt)
        self._job.num_output_tokens += len(output.token_ids)
        return _Choice(output.token_ids, [entry.logprob for entry in output.logprobs or ()])

    async def _deliver(
        self,
        window: AudioWindow,
        prompt: list[int],
        params: SamplingParams,
        rules: TranscriptRules | None,
    ) -> CompletionOutput:
        audio = AudioWindow(window.digest, window.features, rules)
        return (await self._submit(audio, prompt, params)).outputs[0]

    async def _submit(
        self, audio: AudioWindow, prompt: list[int], params: SamplingParams
    ) -> RequestOutput:
        outputs: list[RequestOutput] = []

        async def put(output: RequestOutput) -> None:
            outputs.append(output)

        submission = Submission(
            request_id=self._job.request_id,
            prompt=prompt,
            params=params,
            priority=self._job.priority,
            deadline_s=self._job.time_left_s(time.monotonic()),
            audio=audio,
            stream=False,
            group=self._job.group,
        )
        await self._engine.deliver(submission, OutputSink(put))
        return outputs[-1]

    def _knows(self, language: str) -> bool:
        return language in self.tokens.languages if self.tokens.languages else language == "en"

    def _encoded(self, text: str) -> list[int]:
        return self._engine.tokenizer.encode(text, add_special_tokens=False)

    def _decoded(self, token_ids: list[int]) -> str:
        return self._engine.tokenizer.decode(token_ids)


def make_window(samples: NDArray[np.float32], speech: SpeechInfo) -> AudioWindow:
    features = feature_rows(log_mel(samples, speech.num_mels, speech.num_frames)).tobytes()
    return AudioWindow(hashlib.blake2b(features, digest_size=16).digest(), features)


def speech_tokens(tokenizer: Tokenizer, vocab_size: int) -> SpeechTokens:
    """Raises InvalidRequest for a tokenizer that has not Whisper's special tokens."""

    def find(text: str) -> int | None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return ids[0] if len(ids) == 1 else None

    try:
        return transcript.find_tokens(find, vocab_size)
    except KeyError as error:
        raise InvalidRequest(
            f"the model's tokenizer has no token {error.args[0]}", param="model"
        ) from None
