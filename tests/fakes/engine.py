"""An engine that behaves, without a model: tokens follow from prompt, seed and place.

It keeps AsyncEngine's promises to the API server: outputs in order, one output at the end when not
streamed, RequestErrors before or after outputs, cancelling aborts.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo_engine.config import EngineConfig
from octavo_engine.core.info import CoreHealth, ModelInfo
from octavo_engine.core.kv_events.residency_feed import ResidencyFeed
from octavo_engine.core.pooling.async_pooling import check_items
from octavo_engine.core.text.logprobs import DecodedLogprobs, TokenChoice
from octavo_engine.core.text.outputs import CompletionOutput, RequestOutput
from octavo_engine.core.validate import settle_params
from octavo_engine.errors import InvalidRequest, ModelUnknown
from octavo_engine.state.adapter import AdapterRef
from octavo_engine.state.outputs import EngineStats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from octavo_engine.core.media.workers import PictureWorkers
    from octavo_engine.core.pooling.async_pooling import PoolingItem
    from octavo_engine.core.text.output_stream import OutputSink
    from octavo_engine.core.text.submission import Submission
    from octavo_engine.errors import RequestError
    from octavo_engine.protocol.loading import LoadProgress
    from octavo_engine.state.pooling import PoolingParams
    from octavo_engine.state.sampling_params import SamplingParams

LETTERS = "abcdefghijklmnopqrstuvwxyz "
VOCAB_SIZE = 300
EOS = 257


class FakeTemplate:
    def render(
        self, messages: Sequence[Any], *, add_generation_prompt: bool = True, **_: Any
    ) -> str:
        lines = "".join(f"<{m['role']}>{m.get('content', '')}\n" for m in messages)
        return lines + ("<assistant>" if add_generation_prompt else "")


class FakeTokenizer:
    """Bytes are tokens; those above 255 are special and have no text."""

    chat_template = FakeTemplate()
    bos_token_id: int | None = None
    eos_token_ids = (EOS,)
    vocab_size = VOCAB_SIZE
    strips_first_space = False
    special_ids = frozenset(range(256, VOCAB_SIZE))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def least_tokens(self, text: str) -> int:
        return len(text.encode())

    def render_chat(
        self, messages: Sequence[Any], *, template: Any, add_special_tokens: bool = False,
        max_tokens: int | None = None, **options: Any,
    ) -> tuple[str, list[int]]:  # fmt: skip
        text = template.render(messages, **options)
        return text, self.encode(text)

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def token_text(self, token: int) -> str:
        return self.decode([token])

    def token_name(self, token: int) -> str:
        return f"▁{self.decode([token])}"

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""


@dataclass
class FakeEngine:
    """Knobs are fields; what happened is in `aborted`, `finished`, `requests`."""

    config: EngineConfig = field(
        default_factory=lambda: EngineConfig(
            model="fake", device="sim", served_model_names=("fake", "alias")
        )
    )
    state: str = "ready"
    progress: float = 1.0
    loading: LoadProgress | None = None
    max_model_len: int = 256
    tasks: tuple[str, ...] = ("generate",)
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    news_before_error: int = 0
    error: Exception | None = None  # raised after so many news
    hold_after: int | None = None  # tokens after which nothing comes until `release`
    cached_tokens: int = 0
    aborted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    requests: list[tuple[list[int], SamplingParams, dict[str, Any]]] = field(default_factory=list)
    deadlines: list[float | None] = field(default_factory=list)
    pictures: PictureWorkers | None = None

    def __post_init__(self) -> None:
        self.tokenizer: Any = FakeTokenizer()
        self.stats = EngineStats(kv_blocks_total=100)
        self.residency = ResidencyFeed(lambda message: None)
        self.default_params: dict[str, float] = {}
        self.stopped: set[str] = set()  # by their ids
        self.pooled: list[tuple[list[PoolingItem], PoolingParams]] = []
        self.num_resets = 0
        self.num_adapter_loads = 0
        self.refused_adapters: set[str] = set()
        self.unloaded_adapters: list[str] = []
        self.sleeps: list[bool] = []
        self.sleep_levels: list[int] = []
        self.profiles: list[str] = []  # started, then the file each went to
        self.release = asyncio.Event()
        self.holding = asyncio.Event()
        self.aborts = asyncio.Event()
        self.loaded = asyncio.Event()
        if self.state != "loading":
            self.loaded.set()

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            names=self.config.names, max_model_len=self.max_model_len, vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,), num_blocks=100, kv_bytes=0, backend="fake",
            default_params=self.default_params, load_seconds=0.5, cache_key=b"",
            architecture="FakeForCausalLM", format="safetensors bfloat16",
            tasks=self.tasks, embedding_size=8, dimensions=(4, 8), labels=("even", "odd"),
            prompts=self.prompts, default_prompt=self.default_prompt,
        )  # fmt: skip

    async def ready(self) -> ModelInfo:
        await self.loaded.wait()
        return self.info

    def health(self) -> CoreHealth:
        reason = "" if self.state == "ready" else self.state
        return CoreHealth(self.state, reason, self.progress, self.loading)  # type: ignore[arg-type]  # a test's own word

    async def drain(self, timeout_s: float) -> bool:
        self.state = "draining"
        return True

    async def stop(self) -> None:
        self.state = "dead"

    def settle_seed(self, seed: int | None) -> int:
        return 0 if seed is None else seed

    async def abort(self, request_id: str) -> bool:
        """The request ends at its next token, with what it has."""
        known = any(requested["request_id"] == request_id for _, _, requested in self.requests)
        known = known and request_id not in self.finished
        if known:
            self.stopped.add(request_id)
            self.release.set()
        return known

    async def load_adapter(self, name: str, path: str, *, is_pinned: bool = False) -> AdapterRef:
        if path in self.refused_adapters:
            raise ModelUnknown("there is none", param="lora_path", code="adapter_not_found")
        self.num_adapter_loads += 1
        return AdapterRef(name, path, f"{path}-{self.num_adapter_loads}")

    async def unload_adapter(self, digest: str) -> None:
        self.unloaded_adapters.append(digest)

    async def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    async def sleep(self, *, on: bool, level: int = 1) -> None:
        self.sleeps.append(on)
        self.sleep_levels.append(level)

    async def start_profile(self) -> None:
        self.profiles.append("")

    async def stop_profile(self, path: str) -> int:
        if not self.profiles or self.profiles[-1]:
            raise InvalidRequest("no steps were being recorded")
        self.profiles.append(path)
        return 1

    async def pool(
        self, items: Sequence[PoolingItem], params: PoolingParams, *, request_id: str,
        deadline_s: float | None = None,
    ) -> list[NDArray[np.float32]]:  # fmt: skip
        """Vectors that follow from the tokens; see `vector`."""
        check_items(items, params, self.info)
        self.pooled.append((list(items), params))
        if self.error is not None:
            raise self.error.with_traceback(None)  # it may be raised again: no frames of then
        try:
            if self.hold_after is not None:
                self.holding.set()
                await self.release.wait()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.aborted.append(request_id)
            self.aborts.set()
            raise
        return [self.vector(item, params) for item in items]

    def vector(self, item: PoolingItem, params: PoolingParams) -> NDArray[np.float32]:
        """Counts of letters for embeddings, so that texts of like letters are alike."""
        rows = [np.bincount([token % 8], minlength=8) for token in item.token_ids]
        match params.task:
            case "embed" | "token_embed":
                table = np.array(rows, np.float32)[:, : params.dimensions]
                if params.task == "embed":
                    table = table.sum(axis=0, keepdims=True)
                if params.activate is not False:
                    table /= np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
            case "score":
                first = {t for t, kind in zip(*item, strict=True) if kind == 0}
                second = {t for t, kind in zip(*item, strict=True) if kind == 1}
                table = np.array([[len(first & second) / len(second)]], np.float32)
            case _:
                share = np.mean([token % 2 for token in item.token_ids])
                table = np.array([[1 - share, share]], np.float32)
                if params.task == "token_classify":
                    table = np.repeat(table, len(rows), axis=0)
        return table if params.task.startswith("token_") else table[0]

    async def deliver(self, submission: Submission, sink: OutputSink[RequestOutput]) -> None:
        assert not isinstance(submission.prompt, str)
        assert not submission.resumed, "for resumes take the simulator"
        ids, request_id = list(submission.prompt), submission.request_id
        params = settle_params(ids, submission.params, self.info, self.tokenizer)
        requested = {
            "request_id": request_id,
            "priority": submission.priority,
            "group": submission.group,
        }
        self.requests.append((ids, params, requested))
        self.deadlines.append(submission.deadline_s)
        stream, inline = submission.stream, sink.inline
        self.stats.prompt_tokens += len(ids)
        whole: RequestOutput | None = None
        count = 0
        try:
            answers = [self.answer(ids, params, index) for index in range(params.n)]
            for position in range(max(map(len, answers))):
                if self.error is not None and count >= self.news_before_error:
                    raise self.error.with_traceback(
                        None
                    )  # it may be raised again: no frames of then
                if position == self.hold_after:
                    self.holding.set()
                    await self.release.wait()
                await asyncio.sleep(0)
                if request_id in self.stopped:
                    last = self.cut_short(request_id, ids, position)
                    if whole is not None:
                        whole.absorb(last)
                    await sink.put(whole or last)
                    self.finished.append(request_id)
                    return
                news = RequestOutput(request_id, None, ids)
                if position == 0:
                    news.num_cached_tokens = self.cached_tokens
                    if params.prompt_logprobs is not None:
                        scored = [self.logprob(t, params.prompt_logprobs) for t in ids[1:]]
                        news.prompt_logprobs = [None, *scored]
                for index, answer in enumerate(answers):
                    if position < len(answer):
                        news.outputs.append(self.output(params, index, answer, position))
                        self.stats.generation_tokens += 1
                news.finished = position + 1 == max(map(len, answers))
                count += 1
                if stream and inline is not None and inline.is_open() and not news.finished:
                    inline.put(news)
                elif stream:
                    await sink.put(news)
                elif whole is None:
                    whole = news
                else:
                    whole.absorb(news)
            if whole is not None:
                await sink.put(whole)
            self.finished.append(request_id)
        finally:
            if request_id not in self.finished:
                self.aborted.append(request_id)
                self.aborts.set()

    def cut_short(self, request_id: str, ids: list[int], count: int) -> RequestOutput:
        last = CompletionOutput(0, num_tokens=count, finish_reason="abort")
        return RequestOutput(request_id, None, ids, [last], finished=True)

    def output(
        self, params: SamplingParams, index: int, answer: list[tuple[int, str, Any]], position: int
    ) -> CompletionOutput:
        token, text, stop = answer[position]
        new = CompletionOutput(index, text, [token], num_tokens=position + 1)
        if params.logprobs is not None:
            requested = params.logprob_token_ids
            new.logprobs = [self.logprob(token, params.logprobs, position, requested)]
        if position + 1 == len(answer):
            new.finish_reason = "length" if stop is None else "stop"
            new.stop_reason = stop if isinstance(stop, str) else None
        return new

    def answer(
        self, ids: list[int], params: SamplingParams, index: int
    ) -> list[tuple[int, str, str | bool | None]]:
        """(token, its text, what stopped there)."""
        seed = 0 if params.is_greedy else (params.seed or 0) + index
        result: list[tuple[int, str, str | bool | None]] = []
        text = ""
        for place in range(params.max_tokens or 0):
            digest = hashlib.blake2b(repr((ids, seed, place)).encode()).digest()
            letter = LETTERS[digest[0] % len(LETTERS)]
            if digest[1] == 0 and not params.ignore_eos:
                result.append((EOS, "", True))
                break
            text += letter
            met = next((stop for stop in params.stop if text.endswith(stop)), None)
            result.append((ord(letter), letter, met))
            if met is not None:
                break
        return result

    def logprob(
        self, token: int, top: int, offset: int = 0, requested: Sequence[int] = ()
    ) -> DecodedLogprobs:
        text, raw = self.tokenizer.token_text(token), self.tokenizer.token_bytes(token)
        others = [
            TokenChoice(65 + i, chr(65 + i), bytes([(65 + i) % 256]), -1.0 - i, i + 1)
            for i in range(top)
        ]
        if requested:
            others = [TokenChoice(i, chr(i), bytes([i % 256]), -float(i), None) for i in requested]
        logprob = -math.inf if token == EOS else -0.5
        return DecodedLogprobs(token, text, raw, logprob, 1, others, offset)


def fail(error: RequestError, after: int = 0) -> FakeEngine:
    """An engine whose every request fails after so many news."""
    return FakeEngine(error=error, news_before_error=after)
