"""An engine that says what a test wrote down, a character a token, and can be resumed anywhere."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo_engine.core.text.outputs import CompletionOutput, RequestOutput
from octavo_engine.core.validate import settle_params
from tests.fakes.engine import EOS, FakeEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.core.text.output_stream import OutputSink
    from octavo_engine.core.text.resumed import ResumedOutput
    from octavo_engine.core.text.submission import Submission
    from octavo_engine.state.sampling_params import SamplingParams


@dataclass
class ScriptedEngine(FakeEngine):
    """Answer i says script i; the last one stands for all further ones. ASCII only."""

    max_model_len: int = 4096
    scripts: list[str] = field(default_factory=lambda: ["Hello."])
    piece: int = 1  # tokens in one output

    async def deliver(self, submission: Submission, sink: OutputSink[RequestOutput]) -> None:
        assert not isinstance(submission.prompt, str)
        ids, request_id = list(submission.prompt), submission.request_id
        params = settle_params(ids, submission.params, self.info, self.tokenizer)
        self.requests.append((ids, params, {"request_id": request_id}))
        answers = [self.pieces(index, params, submission.resumed) for index in range(params.n)]
        whole = RequestOutput(request_id, None, ids)
        inline = sink.inline
        for step in range(max(map(len, answers))):
            await asyncio.sleep(0)
            output = RequestOutput(request_id, None, ids)
            output.outputs = [answer[step] for answer in answers if step < len(answer)]
            output.finished = step + 1 == max(map(len, answers))
            if not submission.stream:
                whole.absorb(output)
            elif inline is not None and inline.is_open() and not output.finished:
                inline.put(output)
            else:
                await sink.put(output)
        if not submission.stream:
            await sink.put(whole)
        self.finished.append(request_id)

    def pieces(
        self, index: int, params: SamplingParams, resumed: Sequence[ResumedOutput]
    ) -> list[CompletionOutput]:
        text = self.scripts[min(index, len(self.scripts) - 1)]
        done = len(resumed[index].token_ids) if resumed else 0
        if resumed and resumed[index].ended:
            return []
        tokens = [*text.encode(), EOS]
        limit = params.max_tokens or len(tokens)
        is_cut = limit < len(tokens)
        tokens = tokens[:limit]
        result = []
        for at in range(done, len(tokens), self.piece):
            ids = tokens[at : at + self.piece]
            new = CompletionOutput(index, text[at : at + len(ids)], ids, num_tokens=at + len(ids))
            if params.logprobs is not None:
                new.logprobs = [
                    self.logprob(token, params.logprobs, at + i) for i, token in enumerate(ids)
                ]
            result.append(new)
        if done and not result:  # it was complete
            result = [CompletionOutput(index, num_tokens=done)]
        end = 0
        texts: list[str] = []
        for length in (resumed[index].pieces or (done,)) if done else ():
            texts.append(text[end : end + length])
            end += length
        for new in result:
            new.resumed_texts = texts
        result[-1].finish_reason = "length" if is_cut else "stop"
        return result
