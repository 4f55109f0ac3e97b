"""An answer is the same whole, in pieces, and in pieces that several servers sent after breaks."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from octavo_engine.config import EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.protocol.endpoints import RESUME_HEADER, STREAM_HEADER
from octavo_router.proxy.resume import StreamMemory
from octavo_router.residency import native
from tests.differential.bodies import RESUMED, SPEAKERS, TOKENS, Bodies
from tests.differential.difference import Difference, first_difference
from tests.differential.reading import call_ids, of_stream, of_whole
from tests.fakes.simulated import simulating
from tests.fakes.talkative import VOCAB, TalkativeBackend

if TYPE_CHECKING:
    from random import Random

PLAIN = EngineConfig(
    model="m", device="sim", max_model_len=512,
    scheduler=SchedulerConfig(enable_prefix_caching=False, queue_timeout_s=math.inf),
    sim=SimConfig(vocab_size=VOCAB, kv_blocks=256),
)  # fmt: skip


def any_config(rng: Random) -> EngineConfig:
    """An engine of which nobody should notice how it is set."""
    guessing = (
        '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, '
        '"prompt_lookup_max": 3}'
    )
    return PLAIN.replace(
        stream_interval=rng.choice([1, 1, 3, 20]),
        speculative_config=guessing if rng.random() < 0.5 else None,
        scheduler=SchedulerConfig(
            max_num_seqs=rng.choice([1, 3, 8]),
            max_num_batched_tokens=rng.choice([16, 64, 512]),
            queue_timeout_s=math.inf,  # refusals are no answers
        ),
        sim=SimConfig(vocab_size=VOCAB, kv_blocks=rng.choice([33, 64])),
    )


@dataclass(slots=True)
class Count:
    """What was compared."""

    answers: int = 0
    refusals: int = 0
    resumes: int = 0


class Pair:
    """A plain server, which says what is right, and an odd one."""

    def __init__(
        self, rng: Random, speaker: str, stack: ExitStack, config: EngineConfig | None = None
    ) -> None:
        self._rng = rng
        self.speaker = SPEAKERS[speaker]
        self._config = config or any_config(rng)
        self._where = f"{speaker}: {self._config}"
        self._plain, self._odd = (
            stack.enter_context(self._client(config, stack)) for config in (PLAIN, self._config)
        )
        self.count = Count()

    def _client(self, config: EngineConfig, stack: ExitStack) -> httpx.Client:
        backend = TalkativeBackend(self.speaker.texts)
        server = stack.enter_context(simulating(config, self.speaker.settings, backend=backend))
        return httpx.Client(base_url=server.url, timeout=30)

    def check(self, path: str, body: dict[str, Any], *, num_cuts: int) -> None:
        """Raises Difference. `stream_options` are of the streams."""
        whole = {name: value for name, value in body.items() if name != "stream_options"}
        answer = self._plain.post(path, json=whole)
        if answer.status_code != 200:
            assert answer.status_code < 500, answer.text
            refusal = _without_id(answer.json())
            self._same(path, body, "refusal", self._streamed_refusal(path, body), refusal)
            self.count.refusals += 1
            return
        truth = of_whole(path, answer.json())
        call_ids(truth)
        again = of_whole(path, self._odd.post(path, json=whole).json())
        call_ids(again)
        self._same(path, body, "whole", again, truth)
        for client in (self._plain, self._odd):
            reported = self._streamed(path, body, client)
            call_ids(reported)
            self._same(path, body, "streamed", reported, truth)
        self.count.answers += 1
        if path in RESUMED and num_cuts:
            self._cut(path, body, truth, num_cuts)

    def _streamed_refusal(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """In place of a stream, or its last event: a choice can fail once others have begun."""
        answer = self._odd.post(path, json=streaming(path, body))
        if answer.status_code != 200:
            return _without_id(answer.json())
        events = [event for event in answer.content.split(b"\n\n") if event]
        (refused,) = (event for event in events if event.startswith(b'data: {"error"'))
        return _without_id(json.loads(refused.removeprefix(b"data: ")))

    def _streamed(
        self, path: str, body: dict[str, Any], client: httpx.Client | None = None
    ) -> dict[str, Any]:
        answer = (client or self._odd).post(path, json=streaming(path, body))
        if answer.status_code != 200:
            return _without_id(answer.json())
        return of_stream(path, answer.content)

    def _cut(self, path: str, body: dict[str, Any], truth: dict[str, Any], num_cuts: int) -> None:
        """Breaks one stream at many places, and what follows again and again."""
        rng = self._rng
        content = json.dumps(streaming(path, body)).encode()
        raw = self._ask(path, content)
        hot = native.load()
        whole = StreamMemory(hot.split_token_lines, hot.find_event_end)
        unbroken = of_stream(path, whole.feed(raw))
        ids = call_ids(unbroken)
        self._same(path, body, "streamed to a router", unbroken, truth)
        ends = _ends(raw)
        places = range(len(ends) - 1)
        for place in sorted(rng.sample(places, min(num_cuts, len(places)))):
            memory = StreamMemory(hot.split_token_lines, hot.find_event_end)
            at = rng.randrange(ends[place], ends[place + 1])
            relayed, stream, cuts = memory.feed(raw[:at]), raw, [at]
            while memory.can_resume:
                request = memory.resume_body(content)
                memory.start_over()
                stream = self._ask(path, request, resumes=True)
                at = rng.choice([len(stream), rng.randrange(1, len(stream) + 1)])
                if at < len(stream):
                    at = max(at, _ends(stream)[0])  # it gets further each time
                cuts.append(at)
                relayed += memory.feed(stream[:at])
                assert not memory.lost_with, memory.problem
                self.count.resumes += 1
            reported = of_stream(path, relayed + memory.missing)
            told_ids = call_ids(reported)
            where = f"resumed after {cuts} bytes"
            self._same(path, body, where, reported, truth)
            self._same(path, body, f"{where}: ids of calls", told_ids, ids)

    def _ask(self, path: str, content: bytes, *, resumes: bool = False) -> bytes:
        headers = {"content-type": "application/json", STREAM_HEADER: "tokens"}
        if resumes:
            headers[RESUME_HEADER] = "1"
        answer = self._odd.post(path, content=content, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.content

    def _same(self, path: str, body: Any, how: str, got: Any, truth: Any) -> None:
        if got != truth:
            raise Difference(
                f"{self._where}\nPOST {path} {json.dumps(body, ensure_ascii=False)}\n"
                f"{how}: {first_difference(got, truth)}"
            )


def streaming(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The same request, streamed, and with its sum where that has to be asked for."""
    requested = {**body, "stream": True}
    if path in (*RESUMED, TOKENS):
        requested["stream_options"] = {"include_usage": True, **body.get("stream_options", {})}
    return requested


def _without_id(refusal: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in refusal.items() if name != "request_id"}


def compare(rng: Random, *, num_bodies: int, num_cuts: int, speaker: str = "") -> Count:
    """With one pair of servers."""
    speaker = speaker or rng.choice(list(SPEAKERS))
    with ExitStack() as stack:
        pair = Pair(rng, speaker, stack)
        bodies = Bodies(rng, pair.speaker)
        for _ in range(num_bodies):
            pair.check(*bodies.body(), num_cuts=num_cuts)
        return pair.count


def _ends(stream: bytes) -> list[int]:
    """Where each event ends."""
    ends, at = [], 0
    while (at := stream.find(b"\n\n", at)) >= 0:
        at += 2
        ends.append(at)
    return ends
