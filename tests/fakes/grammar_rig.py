"""An engine on a fake backend whose requests may bring grammars, stepped by hand."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from octavo_engine.config import EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core.build import build_engine
from octavo_engine.core.grammar_queue import GrammarQueue
from octavo_engine.grammar.compiler import CompilerSettings, GrammarCompiler
from octavo_engine.grammar.normal import choice_spec, grammar_spec, json_schema_spec, regex_spec
from octavo_engine.grammar.vocabulary import Vocabulary
from octavo_engine.tokenization.bytes_tokenizer import EOS, ByteTokenizer
from tests.fakes.backend import FakeBackend
from tests.fakes.requests import make_request

if TYPE_CHECKING:
    from octavo_engine.core.engine import Engine
    from octavo_engine.errors import RequestError
    from octavo_engine.state.grammar import GrammarSpec
    from octavo_engine.state.outputs import SequenceOutput
    from octavo_engine.state.request import EngineRequest

VOCAB = 512
TOKENS = ByteTokenizer(VOCAB)
CHOICES = ["forty-two and a half", "forty-two and nothing", "forty", "none at all", "no"]
CHOICE = choice_spec(CHOICES)
FIXED = json_schema_spec(
    {
        "type": "object",
        "properties": {"kind": {"const": "a rather long constant"}, "n": {"enum": [1, 2, 12]}},
        "required": ["kind", "n"],
    },
    strict=True,
    any_whitespace=False,
)

SPECS = [
    FIXED, CHOICE, regex_spec(r"ab{3,40}c?d"), grammar_spec('root ::= "((" root "))" | "x"'),
    json_schema_spec({"type": "object", "properties": {"a": {"type": "boolean"}}}),
    regex_spec("(yes|yellow) indeed", after="=>"), None,
]  # fmt: skip


@functools.cache
def vocabulary() -> Vocabulary:
    return Vocabulary(TOKENS, vocab_size=VOCAB)


class Answer:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[Any] = []
        self.reason: str | None = None
        self.error: str | RequestError | None = None
        self.is_whole = False
        self.num_outputs = 0

    @property
    def text(self) -> str:
        return TOKENS.decode([t for t in self.tokens if t != EOS])

    def add(self, output: SequenceOutput) -> None:
        assert self.reason is None, "an ending comes once"
        self.tokens += output.token_ids
        self.logprobs += output.logprobs
        self.reason, self.error = output.finish_reason, output.error
        self.is_whole = output.is_whole
        self.num_outputs += bool(output.token_ids)


class Rig:
    """An engine on a fake backend; answers by request id."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        is_jumping: bool = True,
        settings: CompilerSettings | None = None,
        now: Any = None,
        **scheduler: Any,
    ) -> None:
        config = EngineConfig(
            device="sim",
            max_model_len=min(256, 16 * num_blocks),
            scheduler=SchedulerConfig(
                **{"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_queue": 100, **scheduler}
            ),
            sim=SimConfig(kv_blocks=num_blocks, vocab_size=VOCAB),
        )
        self.backend = FakeBackend(num_blocks, VOCAB, peak=0.5)
        keywords = {} if now is None else {"now": now}
        if settings is None and now is None:  # a busy machine's compile is not too late
            settings = CompilerSettings(deadline_s=120.0, queue_s=120.0)
        self.engine: Engine = build_engine(config, backend=self.backend, **keywords)[0]
        compiler = GrammarCompiler(vocabulary, settings, **keywords)
        self.grammars = GrammarQueue(compiler, is_jumping=is_jumping, **keywords)
        self.grammars.workers.patience_s = 10.0  # tests of lateness set their own
        self.engine.use_grammars(lambda: self.grammars)
        self.answers: dict[str, Answer] = {}

    def add(self, spec: GrammarSpec | None = None, *, prompt: Any = 7, **params: Any) -> str:
        params.setdefault("max_tokens", 60)
        request = make_request(prompt, eos=(EOS,), grammar=spec, **params)
        return self.take(request)

    def take(self, request: EngineRequest) -> str:
        self.engine.add(request)
        self.answers[request.request_id] = Answer()
        return request.request_id

    def step(self) -> None:
        for output in self.engine.step().outputs:
            self.answers[output.request_id].add(output)
        for request_id, error in self.engine.take_refused():
            self.answers[request_id].reason = "refused"
            self.answers[request_id].error = error
        self.engine.scheduler.check_invariants()

    def run(self) -> dict[str, Answer]:
        for _ in range(20_000):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "the work does not come to an end"
        self.check_idle()
        return self.answers

    def check_idle(self) -> None:
        assert len(self.grammars) == 0
        pool = self.engine.scheduler.kv.pool
        assert pool.num_free == len(pool.blocks)
