"""Offline inference: lists in, lists out, in order and whole; Ctrl-C leaves it usable."""

import gc
import inspect
import os
import signal
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from octavo_engine.config import EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core.offline.llm import LLM
from octavo_engine.core.text.flat_logprobs import FlatLogprobs
from octavo_engine.errors import ConfigError, ContextLengthExceeded, InvalidRequest, OctavoError
from octavo_engine.state.sampling_params import SamplingParams
from octavo_engine.tokenization.bytes_tokenizer import ByteTokenizer
from tests.differential.models import Settings, TinyModel
from tests.fakes.backend import FakeBackend

if TYPE_CHECKING:
    from octavo_engine.core.offline.prompts import Prompt

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
INSTANT = SimConfig(kv_blocks=256, time_scale=0.0)


def make_llm(backend=None, **scheduler):
    config = EngineConfig(
        device="sim",
        max_model_len=512,
        scheduler=SchedulerConfig(**{"max_num_seqs": 4, "max_queue": 2, **scheduler}),
        sim=INSTANT,
    )
    return LLM.from_config(config, backend=backend)


def test_answers_come_whole_and_in_the_order_of_the_prompts():
    backend = FakeBackend(256)
    prompts = [list(b"abc" * (1 + i)) for i in range(30)]  # many more than max_queue
    with make_llm(backend) as llm:
        outputs = llm.generate(prompts, GREEDY)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.prompt_token_ids == prompt and output.finished
            (answer,) = output.outputs
            assert answer.token_ids == backend.continuation(prompt, 8)
            assert (answer.finish_reason, answer.num_tokens) == ("length", 8)
            text = ByteTokenizer().decode(answer.token_ids)
            assert answer.text == text
    assert backend.is_closed


def test_a_prompt_may_be_text_tokens_or_either_in_a_dict():
    with LLM(device="sim", sim=INSTANT) as llm:
        tokens = llm.get_tokenizer().encode("hello")
        params = SamplingParams(seed=1, max_tokens=10)
        forms: list[Prompt] = ["hello", tokens, {"prompt": "hello"}, {"prompt_token_ids": tokens}]
        texts = {llm.generate(form, params)[0].outputs[0].text for form in forms}
        texts |= {output.outputs[0].text for output in llm.generate(forms, params)}
        assert len(texts) == 1
        assert llm.generate("hello", params)[0].prompt == "hello"
        assert llm.generate([], params) == []
        with pytest.raises(InvalidRequest, match="the key prompt or prompt_token_ids"):
            llm.generate({"text": "hello"}, params)  # type: ignore[arg-type]  # the test


def test_a_closed_one_leaves_nothing_behind():
    """However many are opened one after the other."""
    left: list[weakref.ref[Any]] = []
    threads = set(threading.enumerate())  # those of earlier tests may end meanwhile
    for number in range(3):
        llm = TinyModel("Llama").engine(Settings())
        llm.generate([b"ab"] * 3, SamplingParams(max_tokens=4, seed=number), use_tqdm=False)
        core: Any = llm._engine
        left += map(weakref.ref, (llm, core, llm._processor, core.executor._backend))
        llm.close()
        del llm, core
    gc.collect()
    assert [thing() for thing in left] == [None] * len(left)
    assert set(threading.enumerate()) <= threads


def test_only_the_request_that_allows_no_token_fails(caplog):
    wishes = [
        SamplingParams(max_tokens=3, allowed_token_ids=(7,), logit_bias={7: float("-inf")}),
        SamplingParams(max_tokens=3, temperature=0),
    ]
    with TinyModel("Llama").engine(Settings()) as llm:
        refused, well = llm.generate([b"ab", b"ab"], wishes, use_tqdm=False)
    assert (refused.outputs[0].finish_reason, refused.outputs[0].token_ids) == ("error", [])
    assert "position 2: what the request allows" in caplog.text
    assert well.outputs[0].num_tokens == 3


def test_it_tells_what_was_loaded():
    with make_llm() as llm:
        info = llm.info
        assert (info.backend, info.max_model_len, info.num_blocks) == ("sim", 512, 128)
        assert info.vocab_size == llm.get_tokenizer().vocab_size


@pytest.mark.parametrize("prompt", [None, 5, [None], [1.5], [["a"]], {"prompt_token_ids": "abc"}])
def test_what_is_no_prompt_is_refused_in_words(prompt):
    with make_llm() as llm, pytest.raises(InvalidRequest, match="a prompt is a text, a list of"):
        llm.generate(prompt)


def test_an_array_of_token_ids_is_a_prompt():
    with make_llm() as llm:
        listed, array = (llm.generate(p, GREEDY)[0] for p in ([65, 66], np.array([65, 66])))
        assert array.prompt_token_ids == [65, 66]
        assert array.outputs[0].token_ids == listed.outputs[0].token_ids


def test_a_closed_one_says_so():
    llm = make_llm()
    llm.close()
    llm.close()
    with pytest.raises(OctavoError, match="this LLM was closed"):
        llm.generate("a")


def test_each_prompt_may_have_its_own_parameters():
    with LLM(device="sim", sim=INSTANT) as llm:
        params = [SamplingParams(max_tokens=n, n=n) for n in (1, 2, 3)]
        outputs = llm.generate(["a", "b", "c"], params)
        assert [[o.num_tokens for o in out.outputs] for out in outputs] == [[1], [2, 2], [3, 3, 3]]
        with pytest.raises(InvalidRequest, match="3 prompts, but 2 sampling_params"):
            llm.generate(["a", "b", "c"], params[:2])


def test_a_bad_prompt_is_refused_before_any_is_computed_and_named():
    backend = FakeBackend(256)
    with make_llm(backend) as llm:
        steps = backend.num_steps
        with pytest.raises(ContextLengthExceeded) as caught:
            llm.generate([[1], [1] * 512], GREEDY)
        assert caught.value.__notes__ == ["in prompt 1"]
        assert backend.num_steps == steps
        assert llm.generate([1], GREEDY)[0].finished


def test_one_that_fails_is_marked_and_the_others_are_whole(caplog):
    backend = FakeBackend(256)
    backend.fail_after([1, 2, 3, *backend.continuation([1, 2, 3], 4)])
    with make_llm(backend) as llm:
        bad, good = llm.generate([[1, 2, 3], [4, 5, 6]], GREEDY)
        assert (bad.outputs[0].finish_reason, bad.outputs[0].num_tokens) == ("error", 4)
        assert good.outputs[0].token_ids == backend.continuation([4, 5, 6], 8)
    assert "Prompt 0 failed" in caplog.text


def test_stop_strings_and_logprobs_come_with_the_whole():
    with LLM(device="sim", sim=INSTANT) as llm:
        (full,) = llm.generate("x", SamplingParams(seed=2, max_tokens=40, logprobs=1))
        text = full.outputs[0].text
        stop = text[10:14]
        (cut,) = llm.generate("x", SamplingParams(seed=2, max_tokens=40, stop=(stop,), logprobs=1))
        (answer,) = cut.outputs
        assert answer.text == text[: text.find(stop)] and answer.stop_reason == stop
        assert answer.logprobs is not None and len(answer.logprobs) == answer.num_tokens


def test_chat_renders_one_conversation_or_several():
    with LLM(device="sim", sim=INSTANT) as llm:
        hello = [{"role": "user", "content": "Hello"}]
        bye = [{"role": "user", "content": "Bye"}]
        params = SamplingParams(seed=1, max_tokens=5)
        (one,) = llm.chat(hello, params)
        both = llm.chat([hello, bye], params)
        assert one.prompt is not None and "Hello" in one.prompt
        assert both[0].prompt == one.prompt and "Bye" in (both[1].prompt or "")
        assert both[0].outputs[0].text == one.outputs[0].text


def test_an_engine_seed_makes_runs_repeatable():
    def texts(seed):
        with LLM(device="sim", sim=INSTANT, seed=seed) as llm:
            outputs = llm.generate(["a", "a"], SamplingParams(max_tokens=30))
            return [output.outputs[0].text for output in outputs]

    first = texts(5)
    assert first == texts(5) != texts(6)
    assert first[0] != first[1]
    assert texts(0) != texts(0)


def test_ctrl_c_ends_all_between_two_steps_and_leaves_it_usable():
    backend = FakeBackend(256)
    with make_llm(backend) as llm:
        before = signal.getsignal(signal.SIGINT)
        in_step = []

        def interrupt(step):
            in_step.append(True)
            if len(in_step) == 3:
                os.kill(os.getpid(), signal.SIGINT)

        backend.on_execute = interrupt
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2], [3, 4]], GREEDY)
        assert len(in_step) == 3  # the step at hand was finished, none was begun
        assert signal.getsignal(signal.SIGINT) is before
        backend.on_execute = None
        assert not llm._engine.has_work and llm._engine.stats().kv_blocks_used == 0
        (output,) = llm.generate([1, 2], GREEDY)
        assert output.outputs[0].token_ids == backend.continuation([1, 2], 8)


def test_settings_that_cannot_work_are_said_at_once():
    with pytest.raises(ConfigError, match="memory_fraction"):
        LLM(device="sim", memory_fraction=0.0)
    with pytest.raises(ConfigError, match="simulated KV pool holds 2"):
        LLM(device="sim", sim=SimConfig(kv_blocks=2))


def test_its_defaults_are_those_of_the_settings():
    settings = {**vars_of(EngineConfig()), **vars_of(SchedulerConfig())}
    for name, parameter in inspect.signature(LLM).parameters.items():
        if name not in ("sim", "max_model_len", "others"):
            assert parameter.default == settings[name], name


def vars_of(value):
    return {name: getattr(value, name) for name in value.__slots__}


def test_tokens_asked_for_by_id_have_the_log_probabilities_that_all_have():
    requested = (9, 300, 9, 41)
    common: dict[str, Any] = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
    with make_llm(FakeBackend(256)) as llm:
        every, some, most = llm.generate(
            ["abc"] * 3,
            [
                SamplingParams(**common, logprobs=-1),
                SamplingParams(**common, logprob_token_ids=requested),
                SamplingParams(
                    **common, logprob_token_ids=requested, logprobs=4, prompt_logprobs=2
                ),
            ],
        )
    assert some.outputs[0].token_ids == every.outputs[0].token_ids
    for whole, named in zip(every.outputs[0].logprobs, some.outputs[0].logprobs, strict=True):
        of = {choice.token_id: choice.logprob for choice in whole.top}
        assert [(c.token_id, c.logprob, c.rank) for c in named.top] == [
            (token, of[token], None) for token in requested
        ]
        assert (named.token_id, named.logprob, named.rank) == (
            whole.token_id, whole.logprob, whole.rank,
        )  # fmt: skip
    assert most.outputs[0].logprobs == some.outputs[0].logprobs
    scores = most.prompt_logprobs  # of the prompt the likeliest are told of, as ever
    assert scores[0] is None and [len(entry.top) for entry in scores[1:]] == [2] * 3
    assert [choice.rank for choice in scores[1].top] == [1, 2]


@pytest.mark.parametrize(
    "wish",
    [
        {"logprob_token_ids": tuple(range(129))},
        {"logprob_token_ids": (1, 2), "logprobs": 3},
        {"logprob_token_ids": (1, 512)},
        {"logprob_token_ids": (-1,)},
    ],
)
def test_unknown_logprob_tokens_are_refused_by_name(wish):
    with make_llm() as llm, pytest.raises(InvalidRequest) as caught:
        llm.generate("abc", SamplingParams(**wish))
    assert caught.value.param == "logprob_token_ids"


def test_flat_logprobs_say_what_the_list_says():
    common: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": 20,
        "logprobs": 2,
        "prompt_logprobs": 1,
    }
    with make_llm(FakeBackend(256)) as llm:
        listed, flat = llm.generate(
            ["hello"] * 2,
            [SamplingParams(**common, flat_logprobs=is_flat) for is_flat in (False, True)],
        )
    assert isinstance(flat.outputs[0].logprobs, FlatLogprobs)
    assert list(flat.outputs[0].logprobs) == listed.outputs[0].logprobs
    assert len(flat.outputs[0].logprobs.token_ids) == 60
    assert isinstance(flat.prompt_logprobs, FlatLogprobs)
    assert list(flat.prompt_logprobs) == listed.prompt_logprobs
