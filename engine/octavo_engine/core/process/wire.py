"""What crosses the socket between API server and engine core: typed messages in framed msgpack."""

from __future__ import annotations

import struct
from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec

from octavo_engine.config import EngineConfig  # noqa: TC001  (msgspec reads it)
from octavo_engine.core.info import ModelInfo  # noqa: TC001  (msgspec reads it)
from octavo_engine.errors import (
    ConfigError,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineDead,
    ExtensionMissing,
    GenerationFailed,
    InvalidRequest,
    ModelError,
    ModelUnknown,
    NoSuchModel,
    OctavoError,
    QueueFull,
    RequestError,
)
from octavo_engine.state.labels import Labels  # noqa: TC001  (msgspec reads it)
from octavo_engine.state.media import MediaItem  # noqa: TC001
from octavo_engine.state.outputs import StepOutput  # noqa: TC001
from octavo_engine.state.pooling import PoolingRequest  # noqa: TC001
from octavo_engine.state.request import EngineRequest  # noqa: TC001

MAX_FRAME = 64 << 20  # bytes; a prompt of a million tokens takes five
ENVELOPE = 1024  # bytes of a frame around what it carries, at most
# ValueError: text that is no UTF-8. OctavoError: settings that break their own rules.
_NO_MESSAGE = (msgspec.MsgspecError, OctavoError, ValueError, OverflowError, RecursionError)
_LENGTH = struct.Struct("<I")
_REQUEST_ERRORS: dict[str, type[RequestError]] = {
    kind.__name__: kind
    for kind in (
        InvalidRequest,
        ContextLengthExceeded,
        ModelUnknown,
        QueueFull,
        DeadlineExceeded,
        GenerationFailed,
        EngineDead,
    )
}


class WireError(Exception):
    """The peer sent something that is no message of ours; the connection is of no further use."""


class CoreMessage(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all messages; the class name travels as the tag."""


# From the API server to the core.


class Configure(CoreMessage, frozen=True):
    """The first frame: what to load."""

    config: EngineConfig
    log_level: int
    log_format: Literal["text", "json"] = "text"


class AddRequests(CoreMessage, frozen=True):
    requests: list[EngineRequest]
    prompt: list[int] = []  # of those whose own is empty: the answers to one prompt share it
    media_items: tuple[MediaItem, ...] = ()  # of those with pictures and none of their own


class AddPooling(CoreMessage, frozen=True):
    requests: list[PoolingRequest]


class Abort(CoreMessage, frozen=True):
    request_ids: list[str]
    has_left: bool = False  # the client went away before the end


class Suspend(CoreMessage, frozen=True):
    """Compute nothing of these until they are resumed: see `Scheduler.suspend`."""

    request_ids: list[str]
    on: bool


class CorePing(CoreMessage, frozen=True):
    number: int


class ResetPrefixCache(CoreMessage, frozen=True):
    pass


class SleepCommand(CoreMessage, frozen=True):
    """Give memory back, or take it again: see `CoreEngine.sleep`."""

    on: bool
    level: int = 1


class Label(CoreMessage, frozen=True):
    """Labels for the answer of a sequence that has ended."""

    request_id: str
    labels: Labels


class WatchResidency(CoreMessage, frozen=True):
    """Report from now on which labels are true, starting with a snapshot; or stop."""

    on: bool


class ProfileCommand(CoreMessage, frozen=True):
    """Record steps from now on; or, with `on` false, write what was recorded to `path`."""

    on: bool
    path: str = ""


class LoadAdapter(CoreMessage, frozen=True):
    """Read a LoRA adapter; the answer is in a step's output, or a refusal with this id."""

    load_id: str
    path: str
    is_pinned: bool = False


class UnloadAdapter(CoreMessage, frozen=True):
    """No name stands for the adapter any more."""

    digest: str


class Shutdown(CoreMessage, frozen=True):
    """Stop now, or, when graceful, once all that runs is done."""

    graceful: bool = False


# From the core to the API server.


class CoreProgress(CoreMessage, frozen=True):
    """Bytes of the weights that are in."""

    done: int
    total: int


class Ready(CoreMessage, frozen=True):
    info: ModelInfo


class Pong(CoreMessage, frozen=True):
    """The state of the step loop, sent by another thread."""

    number: int
    steps: int
    step_age_s: float  # how long the step at hand has taken; 0 when none is
    expected_s: float  # how long it should take
    slowest_s: float = 0.0  # how long the slowest of late took


class Outputs(CoreMessage, frozen=True):
    """All that one step yields: one message a step, not one a token."""

    step: StepOutput


class RequestRefused(CoreMessage, frozen=True):
    """A request that was not taken in: its error, on its way over the wire."""

    request_id: str
    kind: str  # class name in errors.py
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None


class Fatal(CoreMessage, frozen=True):
    """The core ends; `kind` is the class name in errors.py that the operator should see."""

    kind: str
    message: str


ToEngine: TypeAlias = (
    AddRequests
    | AddPooling
    | Abort
    | Suspend
    | ResetPrefixCache
    | SleepCommand
    | Label
    | WatchResidency
    | ProfileCommand
    | LoadAdapter
    | UnloadAdapter
)
ToCore: TypeAlias = Configure | ToEngine | CorePing | Shutdown
FromCore: TypeAlias = CoreProgress | Ready | Pong | Outputs | RequestRefused | Fatal
M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()
TO_CORE: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
FROM_CORE: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)


def encode(message: ToCore | FromCore) -> bytes:
    """The message as one frame."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise WireError(f"a message of {len(body)} bytes is above the limit of {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


class MessageReader(Generic[M]):
    """Cuts a byte stream into messages. Bytes arrive in any portions."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """The messages that are whole with these bytes. Raises WireError; then stop reading."""
        buffer = self._buffer
        buffer += data
        messages: list[M] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME:
                raise WireError(f"a frame of {length} bytes is above the limit of {MAX_FRAME}")
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            messages.append(self._decode(bytes(buffer[start + _LENGTH.size : end])))
            start = end
        del buffer[:start]
        return messages

    def _decode(self, body: bytes) -> M:
        try:
            return self._decoder.decode(body)
        except _NO_MESSAGE as error:
            raise WireError(f"a frame of {len(body)} bytes is no message: {error}") from error


def add_answers(sequences: list[EngineRequest]) -> AddRequests:
    """The answers to one prompt, which is sent once."""
    if len(sequences) == 1:
        return AddRequests(sequences)
    prompt = sequences[0].prompt_token_ids
    shared = [
        msgspec.structs.replace(sequence, prompt_token_ids=[], media_items=())
        for sequence in sequences
    ]
    return AddRequests(shared, prompt, sequences[0].media_items)


def refusal(request_id: str, error: RequestError) -> RequestRefused:
    """The error of one request as a message."""
    return RequestRefused(
        request_id=request_id,
        kind=type(error).__name__,
        message=_sound(error.message),
        param=error.param,
        code=error.code,
        retry_after_s=error.retry_after_s,
    )


def _sound(text: str) -> str:
    """A message may quote what a client sent: JSON spells half characters, UTF-8 does not."""
    return text.encode("utf-8", "backslashreplace").decode()


def error_of(refused: RequestRefused) -> RequestError:
    """The error that `refusal` was made from."""
    kind = _REQUEST_ERRORS.get(refused.kind, GenerationFailed)
    return kind(
        refused.message,
        param=refused.param,
        code=refused.code,
        retry_after_s=refused.retry_after_s,
    )


def startup_error_of(fatal: Fatal) -> OctavoError:
    """The error that ended the core while it started, as its operator should see it."""
    kinds = {
        kind.__name__: kind for kind in (ConfigError, ExtensionMissing, ModelError, NoSuchModel)
    }
    return kinds.get(fatal.kind, OctavoError)(fatal.message)
