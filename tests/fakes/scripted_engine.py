"""An engine that says what a test wrote down, a character a token, and can be resumed anywhere."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo_engine.core.text.outputs import CompletionOutput, RequestOutput
from octavo_engine.core.validate import settle_params
from tests.fakes.engine import EOS, FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from octavo_engine.core.text.output_stream import InlineSink
    from octavo_engine.core.text.resumed import ResumedOutput
    from octavo_engine.state.labels import Labels
    from octavo_engine.state.sampling_params import SamplingParams


@dataclass
class ScriptedEngine(FakeEngine):
    """Answer i says script i; the last one stands for all further ones. ASCII only."""

    max_model_len: int = 4096
    scripts: list[str] = field(default_factory=lambda: ["Hello."])
    piece: int = 1  # tokens in one piece of news

    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams, *, request_id: str,
        priority: int = 0, deadline_s: float | None = None, cache_salt: str = "",
        told: Sequence[ResumedOutput] = (), labels: Labels | None = None, stream: bool = True,
        tap: InlineSink[RequestOutput] | None = None, group: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:  # fmt: skip
        assert not isinstance(prompt, str)
        ids = list(prompt)
        params = settle_params(ids, params, self.info, self.tokenizer)
        self.requests.append((ids, params, {"request_id": request_id}))
        answers = [self.pieces(index, params, told) for index in range(params.n)]
        whole = RequestOutput(request_id, None, ids)
        for step in range(max(map(len, answers))):
            await asyncio.sleep(0)
            news = RequestOutput(request_id, None, ids)
            news.outputs = [answer[step] for answer in answers if step < len(answer)]
            news.finished = step + 1 == max(map(len, answers))
            if not stream:
                whole.absorb(news)
            elif tap is not None and tap.is_open() and not news.finished:
                tap.tell(news)
            else:
                yield news
        if not stream:
            yield whole
        self.finished.append(request_id)

    def pieces(
        self, index: int, params: SamplingParams, told: Sequence[ResumedOutput]
    ) -> list[CompletionOutput]:
        text = self.scripts[min(index, len(self.scripts) - 1)]
        done = len(told[index].token_ids) if told else 0
        if told and told[index].ended:
            return []
        tokens = [*text.encode(), EOS]
        limit = params.max_tokens or len(tokens)
        is_cut = limit < len(tokens)
        tokens = tokens[:limit]
        result = []
        for at in range(done, len(tokens), self.piece):
            ids = tokens[at : at + self.piece]
            new = CompletionOutput(index, text[at : at + len(ids)], ids, num_tokens=at + len(ids))
            new.told_text = text[:done]
            if params.logprobs is not None:
                new.logprobs = [
                    self.logprob(token, params.logprobs, at + i) for i, token in enumerate(ids)
                ]
            result.append(new)
        result[-1].finish_reason = "length" if is_cut else "stop"
        return result
