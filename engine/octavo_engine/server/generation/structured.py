"""The language that an answer must belong to, from the fields that ask for one."""

from __future__ import annotations

import asyncio
import contextvars
import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from octavo_engine.errors import InvalidRequest, QueueFull
from octavo_engine.protocol.endpoints import SCHEMA_LEFT_OVER_HEADER, SCHEMA_VALID_HEADER
from octavo_engine.server.http.errors import not_supported

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.errors import RequestError
    from octavo_engine.server.http.exchange import Exchange
    from octavo_engine.server.openai.schemas import SamplingFields
    from octavo_engine.state.grammar import GrammarSpec
    from octavo_engine.state.sampling_params import SamplingParams

T = TypeVar("T")
NUM_THREADS: Final = 4
MAX_WAITING: Final = 256  # grammars of requests, those that are tried out included
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# What older clients send, and where it went.
LEGACY = {
    "guided_json": 'response_format {"type": "json_schema", …} or structured_outputs {"json": …}',
    "guided_regex": 'structured_outputs {"regex": …}',
    "guided_choice": 'structured_outputs {"choice": […]}',
    "guided_grammar": 'structured_outputs {"grammar": …}',
}
_ASKING = ("response_format", "structured_outputs", *LEGACY)


def grammar_of(request: SamplingFields, *, after: str | None = None) -> GrammarSpec | None:
    """What the answer must be; `after`: only once this text was written. None: anything.

    Tried out, which takes milliseconds as a rule: call it in a grammar thread. Raises RequestError
    that names the field.
    """
    for field, instead in LEGACY.items():
        if getattr(request, field, None) is not None:
            raise not_supported(field, f"use {instead}")
    given = request.structured_outputs
    try:
        spec = _of_response_format(request.response_format, after)
        if given not in (None, {}):
            if spec is not None:
                raise InvalidRequest(
                    "structured_outputs and response_format exclude each other",
                    param="structured_outputs",
                )
            spec = _of_structured_outputs(given, after)
        if spec is not None:
            checked(spec)
    except InvalidRequest as error:
        if error.param in (None, "response_format") and given not in (None, {}):
            error.param = "structured_outputs"
        raise
    return spec


async def with_grammar(request: SamplingFields, params: SamplingParams) -> SamplingParams:
    """The parameters with the grammar that the request asks for, if it does."""
    if not wants_grammar(request):
        return params
    spec = await in_grammar_thread(partial(grammar_of, request))
    return msgspec.structs.replace(params, grammar=spec)


def checked(spec: GrammarSpec) -> GrammarSpec:
    """Raises RequestError for what could not be compiled. Blocks: call it in a grammar thread."""
    from octavo_engine.grammar.trials import shared_trials  # who asks for grammars pays for it

    shared_trials().check(spec)
    return spec


async def in_grammar_thread(work: Callable[[], T]) -> T:
    """Beside the event loop, and in threads of its own: grammars that are tried out for long must
    not hold up what else runs in threads. Raises QueueFull, and what `work` raises."""
    threads = _grammar_threads()
    if threads.num_waiting >= MAX_WAITING:
        raise QueueFull(
            f"{MAX_WAITING} grammars wait to be tried out, the most allowed",
            code="grammar_queue_full",
            retry_after_s=5,
        )
    threads.num_waiting += 1
    try:
        run = contextvars.copy_context().run
        return await asyncio.get_running_loop().run_in_executor(threads.pool, run, work)
    finally:
        threads.num_waiting -= 1


class _GrammarThreads:
    def __init__(self) -> None:
        self.num_waiting = 0  # or running
        self.pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="octavo-grammar-trials")


@cache
def _grammar_threads() -> _GrammarThreads:
    """Started with the first grammar; ended with the process."""
    return _GrammarThreads()


def wants_grammar(request: SamplingFields) -> bool:
    """Whether `grammar_of` has anything to do."""
    return any(getattr(request, field, None) is not None for field in _ASKING)


def name_field(error: RequestError, request: SamplingFields) -> None:
    """The field that the grammar came in: the engine, which compiles it, knows one name only."""
    if error.param == "response_format" and request.response_format is None:
        given = request.structured_outputs not in (None, {})
        error.param = "structured_outputs" if given else "tools"


def note_left_over(exchange: Exchange, grammar: GrammarSpec | None) -> None:
    """Tell the client which keywords of its schema are not enforced, if any."""
    if grammar is not None and grammar.left_over:
        exchange.notes[SCHEMA_LEFT_OVER_HEADER.encode()] = ", ".join(grammar.left_over).encode()


async def note_validity(
    exchange: Exchange, request: SamplingFields, grammar: GrammarSpec | None, texts: list[str]
) -> None:
    """Tell the client whether all its answers are valid, where the grammar leaves that open."""
    schema = _schema_of(request)
    if grammar is None or not grammar.left_over or schema is None:
        return
    from octavo_engine.grammar.trials import shared_trials

    def found() -> list[bool | None]:
        return shared_trials().verdicts(texts, json.dumps(schema))

    try:
        verdicts = await in_grammar_thread(found)
    except QueueFull:  # the answer is there, and no reason to fail
        verdicts = [None]
    word = b"false" if False in verdicts else b"unknown" if None in verdicts else b"true"
    exchange.notes[SCHEMA_VALID_HEADER.encode()] = word


def _schema_of(request: SamplingFields) -> Any:
    """The schema of the answer, as the client has it."""
    match request.response_format, request.structured_outputs:
        case {"type": "json_schema", "json_schema": {"schema": schema}}, _:
            return schema
        case _, {"json": str(text)}:
            return json.loads(text)
        case _, {"json": schema}:
            return schema
    return None


def as_shape(spec: GrammarSpec) -> dict[str, Any]:
    """The same language as a part of a structural tag."""
    if spec.kind == "regex":
        return {"type": "regex", "pattern": spec.text}
    if spec.kind == "lark":
        return {"type": "grammar", "grammar": spec.text}
    if spec.whitespace:
        field = "structured_outputs.whitespace_pattern"
        raise not_supported(field, "not together with tools that may be called")
    value = json.loads(spec.text)
    if spec.kind == "json_schema":
        return {"type": "json_schema", "json_schema": value}
    if spec.kind == "choice":
        texts = [{"type": "const_string", "value": text} for text in value]
        return {"type": "or", "elements": texts}
    if "format" not in value:
        raise not_supported("response_format", "with tools a structural tag needs a format")
    shape: dict[str, Any] = value["format"]
    return shape


def _of_response_format(value: Any, after: str | None) -> GrammarSpec | None:
    from octavo_engine.grammar import normal

    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequest("response_format must be an object", param="response_format")
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return normal.json_object_spec(after=after)
        case "json_schema":
            given = value.get("json_schema")
            field = "response_format.json_schema"
            if not isinstance(given, dict):
                raise InvalidRequest(f"{field} must be an object with a schema", param=field)
            schema = given.get("schema")
            if not isinstance(schema, dict | bool):
                raise InvalidRequest(f"{field}.schema must be a JSON schema", param=field)
            strict = given.get("strict") is True
            return normal.json_schema_spec(schema, strict=strict, relax=not strict, after=after)
        case "structural_tag":
            return normal.structural_tag_spec(value, after=after)
        case kind:
            raise InvalidRequest(
                "response_format.type must be text, json_object, json_schema or structural_tag; "
                f"got {kind!r:.50}",
                param="response_format",
            )


def _of_structured_outputs(value: Any, after: str | None) -> GrammarSpec | None:
    from octavo_engine.grammar import normal

    at = "structured_outputs"
    if not isinstance(value, dict):
        raise InvalidRequest(f"{at} must be an object", param=at)
    kinds = [kind for kind in KINDS if value.get(kind) not in (None, False)]
    if len(kinds) != 1:
        names = ", ".join(KINDS)
        raise InvalidRequest(f"{at} needs exactly one of {names}; got {len(kinds)}", param=at)
    loose = value.get("disable_any_whitespace") is not True
    whitespace = _whitespace(value, kinds[0], loose=loose)
    closed = value.get("disable_additional_properties") is True
    given = value[kinds[0]]
    match kinds[0]:
        case "json":
            return normal.json_schema_spec(
                given, strict=closed, relax=True, any_whitespace=loose, whitespace=whitespace,
                after=after,
            )  # fmt: skip
        case "json_object":
            return normal.json_object_spec(any_whitespace=loose, whitespace=whitespace, after=after)
        case "regex":
            return normal.regex_spec(given, after=after)
        case "choice":
            return normal.choice_spec(given, after=after)
        case "grammar":
            return normal.grammar_spec(given, after=after)
        case _:
            return normal.structural_tag_spec(given, after=after)


def _whitespace(value: dict[str, Any], kind: str, *, loose: bool) -> str:
    """The pattern of what may stand between JSON's tokens; empty: ours."""
    field = "structured_outputs.whitespace_pattern"
    given = value.get("whitespace_pattern")
    if given is None:
        return ""
    if not isinstance(given, str) or not given:
        raise InvalidRequest(f"{field} must be a regular expression", param=field)
    if kind not in ("json", "json_object"):
        raise InvalidRequest(f"{field} is for json and json_object", param=field)
    if not loose:
        raise InvalidRequest(f"{field} and disable_any_whitespace exclude each other", param=field)
    return given
