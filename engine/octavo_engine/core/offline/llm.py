"""Offline inference: a model in this process, or several copies in processes of their own; a list
of prompts in, a list of answers out."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import operator
import time
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from octavo_engine.config import (
    Device,
    DType,
    EngineConfig,
    ExecutorBackend,
    KVCacheDType,
    LoadFormat,
    ModelImpl,
    Quantization,
    Runner,
    SchedulerConfig,
    SimConfig,
    WeightFormat,
)
from octavo_engine.core.interrupt import deferred_interrupt
from octavo_engine.core.media.messages import take_pictures
from octavo_engine.core.model_files import load_model_tokenizer, localized, resolve
from octavo_engine.core.offline.beam_search import beam_search
from octavo_engine.core.offline.engine import build_offline
from octavo_engine.core.offline.lora_request import LoRARequest
from octavo_engine.core.offline.options import (
    as_in_vllm,
    check_llm_options,
    llm_quantization,
    llm_value,
)
from octavo_engine.core.offline.pictures import PARAM as PICTURES
from octavo_engine.core.offline.pictures import OfflinePictures, media_of
from octavo_engine.core.offline.pooling import PoolingMethods
from octavo_engine.core.offline.progress_bar import generation_bar, loading_bar
from octavo_engine.core.offline.vllm_methods import VLLMMethods
from octavo_engine.core.pooling.async_pooling import check_task
from octavo_engine.core.seeds import Seeds
from octavo_engine.core.text.output_processor import OutputProcessor, SettledSubmission
from octavo_engine.core.validate import settle_params
from octavo_engine.errors import InvalidRequest, OctavoError, RequestError
from octavo_engine.profile import StepProfile
from octavo_engine.state.adapter import AdapterRef
from octavo_engine.state.sampling_params import SamplingParams
from octavo_engine.tokenization.tokenizer import check_vocab, ends_of_text

if TYPE_CHECKING:
    from typing import Self

    from octavo_engine.backends.backend import Backend
    from octavo_engine.core.beam_search import BeamSearchParams
    from octavo_engine.core.info import ModelInfo
    from octavo_engine.core.offline.beam_search import BeamSearchOutput
    from octavo_engine.core.offline.prompts import Prompt, PromptDict
    from octavo_engine.core.text.output_processor import TrackedRequest
    from octavo_engine.core.text.outputs import RequestOutput
    from octavo_engine.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


Message: TypeAlias = Mapping[str, Any]  # role, content, and what a template may want beside them

_NO_LIMIT = 2**31 - 1


class LLM(PoolingMethods, VLLMMethods):
    """One model, loaded when this is made. Not for use from several threads at once.

    >>> with LLM("demo://smollm2") as llm:
    ...     llm.generate("The capital of France is")[0].outputs[0].text
    """

    _closed = False

    @as_in_vllm
    def __init__(
        self,
        model: str | PathLike[str] = "demo://smollm2",
        *,
        tokenizer: str | PathLike[str] | None = None,
        revision: str | None = None,
        download_dir: str | PathLike[str] | None = None,
        hf_overrides: Mapping[str, Any] | None = None,
        model_impl: ModelImpl | Literal["vllm"] = "auto",
        trust_remote_code: bool = False,
        device: Device = "auto",
        dtype: DType = "auto",
        quantization: Quantization | WeightFormat = "auto",
        activation_bits: int = 16,
        kv_cache_dtype: KVCacheDType = "auto",
        load_format: LoadFormat = "auto",
        runner: Runner = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 128,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = True,
        kv_cache_memory_bytes: int | None = None,
        memory_fraction: float | None = None,
        num_threads: int | None = None,
        tensor_parallel_size: int = 1,
        enable_expert_parallel: bool = False,
        enable_eplb: bool = False,
        eplb_config: Mapping[str, Any] | None = None,
        pipeline_parallel_size: int = 1,
        data_parallel_size: int = 1,
        distributed_executor_backend: ExecutorBackend | None = "auto",
        seed: int = 0,
        chat_template: str | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        limit_mm_per_prompt: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        mm_processor_cache_gb: float | None = None,
        enable_lora: bool = False,
        max_loras: int = 16,
        max_cpu_loras: int | None = None,
        max_lora_rank: int = 64,
        enforce_eager: bool = False,
        sim: SimConfig | None = None,
        **others: object,
    ) -> None:
        """Names as in vLLM, and None is a default. Raises ConfigError or ModelError, and TypeError
        for unknown names.
        `others` may be settings of vLLM's that ask for what is done here anyway."""
        check_llm_options(others, LLM.__init__)
        scheduler = _scheduler(max_num_seqs, max_num_batched_tokens, enable_prefix_caching)
        config = EngineConfig(
            model=fspath(model), tokenizer=_path(tokenizer), revision=revision,
            download_dir=_path(download_dir), hf_overrides=_as_json(hf_overrides),
            model_impl=llm_value("model-impl", model_impl),
            trust_remote_code=trust_remote_code, device=device,
            **_storage(dtype, quantization, activation_bits, kv_cache_dtype),
            load_format=llm_value("load-format", load_format), runner=runner,
            max_model_len=max_model_len, num_threads=num_threads,
            kv_cache_memory_bytes=kv_cache_memory_bytes, memory_fraction=memory_fraction,
            **_of_processes(tensor_parallel_size, pipeline_parallel_size, data_parallel_size),
            **_of_experts(enable_expert_parallel, enable_eplb, eplb_config),
            distributed_executor_backend=distributed_executor_backend or "auto",
            seed=seed, chat_template=chat_template,
            speculative_config=_as_json(speculative_config),
            **_of_pictures(limit_mm_per_prompt, mm_processor_kwargs, mm_processor_cache_gb),
            enable_lora=enable_lora, max_loras=max_loras,
            max_cpu_loras=max_cpu_loras, max_lora_rank=max_lora_rank,
            enforce_eager=enforce_eager, scheduler=scheduler, sim=sim or SimConfig(),
        )  # fmt: skip
        self._load(config, None)

    @classmethod
    def from_config(cls, config: EngineConfig, *, backend: Backend | None = None) -> Self:
        """With all settings there are, or on a backend made elsewhere."""
        llm = cls.__new__(cls)
        llm._load(config, backend)
        return llm

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """The answers in the order of the prompts. A list of ints is one prompt of token ids.

        With `lora_request`, one for all prompts or one for each, they are those of the model with
        that adapter.

        All prompts are checked before the first is computed. One whose computation fails has
        finish_reason "error"; the others are not touched. Ctrl-C aborts all and leaves this usable.
        """
        self._check_open()
        self._check_awake()
        submissions = self._submissions(prompts, sampling_params, lora_request)
        return self._run(submissions, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """The next message of one conversation, or of each of several. Parts of a message may be
        pictures: `image_url` with a data: URL, or `image_pil` with a PIL image; or sounds:
        `input_audio`, or `audio_url` with a data: URL."""
        template = self._tokenizer.chat_template
        if template is None:
            raise InvalidRequest(
                "the model has no chat template; give one as chat_template", param="messages"
            )
        options: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "continue_final_message": continue_final_message,
            **(chat_template_kwargs or {}),
        }
        prompts = [self._chat_prompt(each, options) for each in _as_conversations(messages)]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """The `beam_width` likeliest answers to each prompt, without sampling."""
        self._check_open()
        parts = []
        for prompt in _as_list(prompts):
            if media_of(prompt)[1]:
                raise InvalidRequest(f"{PICTURES} is not supported by beam_search", param=PICTURES)
            text, token_ids = _parts(prompt)
            parts.append(
                (text, self._tokenizer.encode(text or "") if token_ids is None else token_ids)
            )
        return beam_search(
            parts, params, info=self._info, tokenizer=self._tokenizer,
            generate=lambda tokens, one: self.generate(tokens, one, use_tqdm=False),
        )  # fmt: skip

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def info(self) -> ModelInfo:
        """What was loaded: backend, context, vocabulary, size of the KV pool."""
        return self._info

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's makers recommend, where they do."""
        return SamplingParams(**self._info.default_params)  # type: ignore[arg-type]  # by name

    def start_profile(self) -> None:
        """Record every step from now on."""
        self._engine.record(StepProfile())

    def stop_profile(self, path: str | PathLike[str] = "octavo-profile.json") -> None:
        """Write what was recorded, for ui.perfetto.dev. Raises ConfigError."""
        profile = self._engine.profile
        self._engine.record(None)
        if profile is None:
            raise InvalidRequest("start_profile comes first")
        profile.write(fspath(path))

    def reset_prefix_cache(self) -> bool:
        return self._engine.reset_prefix_cache()

    def close(self) -> None:
        """Let go of the model's memory. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise OctavoError("this LLM was closed; make a new one")

    def _load(self, config: EngineConfig, backend: Backend | None) -> None:
        scheduler = dataclasses.replace(
            config.scheduler, max_queue=_NO_LIMIT, queue_timeout_s=math.inf
        )
        config = config.replace(scheduler=scheduler)  # the whole list is the queue
        with loading_bar(f"Fetching {config.names[0]}") as progress:
            files = resolve(config, progress)
        self._tokenizer = load_model_tokenizer(config, files)
        with loading_bar(f"Loading {config.names[0]}") as progress:
            self._engine, self._info = build_offline(
                localized(config, files), progress=progress, backend=backend
            )
        try:
            check_vocab(self._tokenizer, self._info.vocab_size)
            self._pictures = OfflinePictures(config, self._info, files, self._tokenizer)
        except BaseException:
            self._engine.close()
            raise
        self._processor = OutputProcessor(self._tokenizer)
        self._seeds = Seeds(config.seed)
        self._enqueued = []
        self._adapters: dict[str, AdapterRef] = {}  # read before, by name

    def _chat_prompt(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Prompt:
        marked, pictures = take_pictures(messages, self._pictures.kind)
        template = self._tokenizer.chat_template
        assert template is not None  # checked before
        # Tokens are not made of the rendered text: what a message spells must not become control.
        prompt: PromptDict = {
            "prompt": template.render(marked, **options),
            "prompt_token_ids": self._tokenizer.encode_chat(marked, **options),
        }
        if pictures:
            prompt["multi_modal_data"] = {self._pictures.kind: pictures}
        return prompt

    def _submissions(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        first: int = 0,
    ) -> list[SettledSubmission]:
        """Numbered from `first`. Raises RequestError that names the prompt."""
        check_task("generate", self._info)
        listed = _as_list(prompts)
        submissions = []
        adapters = self._adapters_list(lora_request, len(listed))
        for index, (prompt, params, adapter) in enumerate(
            zip(listed, self._params_list(sampling_params, len(listed)), adapters, strict=True)
        ):
            try:
                submissions.append(self._submission(first + index, prompt, params, adapter))
            except RequestError as error:
                error.add_note(f"in prompt {index}")
                raise
        return submissions

    def _params_list(
        self, given: SamplingParams | Sequence[SamplingParams] | None, length: int
    ) -> Sequence[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * length
        if len(given) != length:
            raise InvalidRequest(
                f"{length} prompts, but {len(given)} sampling_params", param="sampling_params"
            )
        return given

    def _adapters_list(
        self, given: LoRARequest | Sequence[LoRARequest | None] | None, length: int
    ) -> Sequence[AdapterRef | None]:
        if given is None or isinstance(given, LoRARequest):
            return [None if given is None else self._adapter(given)] * length
        if len(given) != length:
            raise InvalidRequest(
                f"{length} prompts, but {len(given)} lora_request", param="lora_request"
            )
        return [None if each is None else self._adapter(each) for each in given]

    def _adapter(self, request: LoRARequest) -> AdapterRef:
        """Read when it is first requested, or requested anew with `load_inplace`."""
        known = self._adapters.get(request.lora_name)
        if known is not None and known.path == request.lora_path and not request.load_inplace:
            return known
        load_id = f"adapter-{request.lora_name}"
        self._engine.load_adapter(load_id, request.lora_path)
        while True:
            step = self._engine.step()
            for refused_id, error in self._engine.take_refused():
                if refused_id == load_id:
                    error.param = "lora_request"
                    raise error
            for loaded in step.adapters:
                if loaded.load_id == load_id:
                    ref = AdapterRef(request.lora_name, request.lora_path, loaded.digest)
                    self._adapters[request.lora_name] = ref
                    return ref

    def _submission(
        self,
        index: int,
        prompt: Prompt,
        params: SamplingParams,
        adapter: AdapterRef | None = None,
    ) -> SettledSubmission:
        text, token_ids = _parts(prompt)
        if token_ids is None:
            assert text is not None
            token_ids = self._tokenizer.encode(text)
        media = None
        kind, given = media_of(prompt)
        if given:
            token_ids, media = self._pictures.put_in(token_ids, given, kind)
        if params.grammar is not None:
            from octavo_engine.grammar.check import check  # most have none

            check(params.grammar)
        return SettledSubmission(
            request_id=str(index),
            prompt=text,
            prompt_token_ids=token_ids,
            params=settle_params(token_ids, params, self._info, self._tokenizer),
            seed=self._seeds.settle(params.seed),
            eos_token_ids=ends_of_text(self._tokenizer, self._info.eos_token_ids),
            arrival_at=time.monotonic(),
            adapter=adapter,
            media=media,
        )

    def _run(
        self, submissions: Sequence[SettledSubmission], *, use_tqdm: bool
    ) -> list[RequestOutput]:
        requests: list[TrackedRequest] = []
        try:
            with (
                deferred_interrupt() as interrupted,
                generation_bar(len(submissions), enabled=use_tqdm) as show,
            ):
                requests += map(self._start, submissions)
                num_tokens = 0
                while self._engine.has_work and not interrupted():
                    outputs = self._engine.step().outputs
                    for refused_id, error in self._engine.take_refused():
                        for sequence_id in self._processor.refuse(refused_id, error).aborts:
                            self._engine.abort(sequence_id)
                    for sequence_id in self._processor.process(outputs).aborts:
                        self._engine.abort(sequence_id)
                    num_tokens += sum(len(output.token_ids) for output in outputs)
                    show(sum(request.finished for request in requests), num_tokens)
            if interrupted():
                raise KeyboardInterrupt
            return [self._result(request) for request in requests]
        finally:
            for request in requests:
                if not request.finished:
                    for sequence_id in self._processor.abort(request):
                        self._engine.abort(sequence_id)

    def _start(self, submission: SettledSubmission) -> TrackedRequest:
        request, sequences = self._processor.add(submission)
        for sequence in sequences:
            try:
                self._engine.add(sequence)
            except RequestError as error:
                for other in self._processor.refuse(sequence.request_id, error).aborts:
                    self._engine.abort(other)
                break
        return request

    def _result(self, request: TrackedRequest) -> RequestOutput:
        if request.error is not None:
            logger.warning(
                "Prompt %s failed: %s", request.submission.request_id, request.error.message
            )
            for answer in request.answers:
                if not answer.finished:
                    request.unread_of(answer).finish_reason = "error"
            request.unread().finished = True
        result = request.take()
        assert result is not None  # finished, so there is an output for each answer
        return result


def _path(given: str | PathLike[str] | None) -> str | None:
    return None if given is None else fspath(given)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
        return [prompts]  # one, or something that is none, which an error names
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]  # all ints: one prompt of token ids
    return prompts  # type: ignore[return-value]  # what is left is a sequence of prompts


def _parts(prompt: Prompt) -> tuple[str | None, list[int] | None]:
    """Text and token ids; one of them at least."""
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, Mapping):
        return None, _token_ids(prompt)
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if token_ids is not None:
        return (text if isinstance(text, str) else None), _token_ids(token_ids)
    if isinstance(text, str):
        return text, None
    raise InvalidRequest(
        "a prompt given as a dict needs the key prompt or prompt_token_ids", param="prompt"
    )


def _token_ids(prompt: object) -> list[int]:
    """Whatever holds whole numbers, arrays too."""
    try:
        return [operator.index(token) for token in prompt]  # type: ignore[attr-defined]  # the except
    except TypeError:
        raise InvalidRequest(
            f"a prompt is a text, a list of token ids, or a dict of them; got {prompt!r:.80}",
            param="prompt",
        ) from None


def _as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> Sequence[Sequence[Message]]:
    if messages and isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]  # messages, so one conversation
    return messages  # type: ignore[return-value]


def _storage(
    dtype: DType, quantization: Quantization | WeightFormat, activation_bits: int,
    kv_cache_dtype: KVCacheDType,
) -> dict[str, Any]:  # fmt: skip
    """In what numbers weights, activations and the KV cache are."""
    weight_format, requested = llm_quantization(quantization)
    return {
        "dtype": dtype,
        "quantization": requested,
        "weight_format": weight_format,
        "activation_bits": activation_bits,
        "kv_cache_dtype": kv_cache_dtype,
    }


def _scheduler(max_seqs: int, max_tokens: int, caches_prefixes: bool) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=max_seqs,
        max_num_batched_tokens=max_tokens,
        enable_prefix_caching=caches_prefixes,
    )


def _of_experts(is_parallel: bool, moves: bool, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Where they are."""
    return {
        "enable_expert_parallel": is_parallel,
        "enable_eplb": moves,
        "eplb_config": _as_json(config),
    }


def _of_processes(tensor: int, pipeline: int, data: int) -> dict[str, Any]:
    """How many there are, and for what."""
    return {
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "data_parallel_size": data,
    }


def _of_pictures(
    limits: Mapping[str, Any] | None, processor: Mapping[str, Any] | None, cache_gb: float | None
) -> dict[str, Any]:
    return {
        "limit_mm_per_prompt": _as_json(limits),
        "mm_processor_kwargs": _as_json(processor),
        "mm_processor_cache_gb": cache_gb,
    }


def _as_json(settings: Mapping[str, Any] | None) -> str | None:
    return None if settings is None else json.dumps(dict(settings))
