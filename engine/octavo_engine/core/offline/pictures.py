"""Pictures and sounds of offline prompts: read, prepared and put into the prompt's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo_engine.core.media.prepare import BadPicture, prepare_decoded
from octavo_engine.core.media.prepare_sound import BadSound, prepare_media, prepare_samples
from octavo_engine.core.media.prompt import PictureTokens, PromptMedia, expand
from octavo_engine.core.media.sources import read_data_url
from octavo_engine.core.media.spec import SoundSpec, read_media_spec
from octavo_engine.errors import InvalidRequest, ModelError, RequestError
from octavo_engine.speech.wav import MAX_RATE, MIN_RATE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.config import EngineConfig
    from octavo_engine.core.info import ModelInfo
    from octavo_engine.core.media.prepare import PreparedPicture
    from octavo_engine.core.media.spec import MediaSpec
    from octavo_engine.models.vision_config import MediaKind
    from octavo_engine.tokenization.tokenizer import Tokenizer
    from octavo_engine.weights.source import ModelFiles

PARAM = "multi_modal_data"
_OWN = {"image": "a PIL image", "audio": "a tuple of samples and their rate"}
_TEXT_MODEL = "this model takes no pictures and no sounds"


class OfflinePictures:
    """How one model's pictures are prepared; without, why they are refused."""

    def __init__(
        self, config: EngineConfig, info: ModelInfo, files: ModelFiles | None, tokenizer: Tokenizer
    ) -> None:
        self._max_images: int | None = None
        self._spec: MediaSpec | None = None
        self._tokens: PictureTokens | None = None
        self._refusal = _TEXT_MODEL
        if not info.sees or files is None:
            return
        try:
            self._spec = read_media_spec(files, config.picture_overrides)
            if self._spec is not None:
                self._max_images = config.max_media_per_prompt(self._spec.media.kind)
                self._tokens = PictureTokens(self._spec.media, tokenizer)
        except ModelError as error:
            self._refusal = str(error)

    @property
    def kind(self) -> MediaKind:
        """What the model takes."""
        return "image" if self._spec is None else self._spec.media.kind

    def put_in(
        self, token_ids: Sequence[int], pictures: Sequence[Any], kind: MediaKind = "image"
    ) -> tuple[list[int], PromptMedia]:
        """The prompt with its pictures or sounds. Raises RequestError."""
        if self._spec is None or self._tokens is None:
            raise RequestError(f"{PARAM}: {self._refusal}", param=PARAM, code="not_supported")
        media = self._spec.media
        if kind != media.kind:
            raise RequestError(
                f"{PARAM}: this model takes {media.noun} ({media.kind}) only",
                param=PARAM, code="not_supported",
            )  # fmt: skip
        if kind == "image" and find_spec("PIL") is None:
            raise RequestError(
                f"{PARAM}: pictures need Pillow; run: pip install pillow",
                param=PARAM, code="not_supported",
            )  # fmt: skip
        if self._max_images is not None and len(pictures) > self._max_images:
            raise InvalidRequest(
                f"{PARAM} holds {len(pictures)} {media.noun}; limit_mm_per_prompt allows "
                f"{self._max_images} in one prompt",
                param=PARAM,
            )
        spec = self._spec.among(len(pictures))
        prepared = [
            _prepared(f"{PARAM}['{kind}'][{number}]", picture, spec)
            for number, picture in enumerate(pictures)
        ]
        return expand(token_ids, prepared, self._tokens, param="prompt")


def media_of(prompt: object) -> tuple[MediaKind, list[Any]]:
    """What a prompt's `multi_modal_data` holds. Raises InvalidRequest."""
    data = prompt.get(PARAM) if isinstance(prompt, Mapping) else None
    if not data:
        return "image", []
    if not isinstance(data, Mapping) or set(data) not in ({"image"}, {"audio"}):
        raise InvalidRequest(
            f"{PARAM} must be a dict with the key image or audio, one of them or a list; video is "
            "not supported",
            param=PARAM,
        )
    ((kind, given),) = data.items()
    # A tuple of samples and their rate is one sound.
    is_many = isinstance(given, list) or (isinstance(given, tuple) and kind == "image")
    return kind, list(given) if is_many else [given]


def _prepared(name: str, picture: Any, spec: MediaSpec) -> PreparedPicture:
    if isinstance(spec, SoundSpec):
        return _prepared_sound(name, picture, spec)
    from PIL import Image

    if isinstance(picture, Image.Image):
        try:
            return prepare_decoded(picture, spec)
        except (BadPicture, OSError) as error:  # a file opened and never read may be broken
            raise InvalidRequest(f"{name} {error}", param=PARAM) from None
    return _read(name, picture, spec)


def _prepared_sound(name: str, sound: Any, spec: SoundSpec) -> PreparedPicture:
    """Of a file, or of samples and their rate."""
    if not isinstance(sound, tuple):
        return _read(name, sound, spec)
    try:
        samples, rate = sound
        if type(rate) is not int or not MIN_RATE <= rate <= MAX_RATE:
            raise BadSound(f"has a rate of {rate!r:.40}; {MIN_RATE} to {MAX_RATE} are read")
        return prepare_samples(np.asarray(samples, np.float32), rate, spec)
    except BadSound as error:
        raise InvalidRequest(f"{name} {error}", param=PARAM) from None
    except (TypeError, ValueError):
        raise InvalidRequest(
            f"{name} must be samples and their rate, as numpy.array and int", param=PARAM
        ) from None


def _read(name: str, given: Any, spec: MediaSpec) -> PreparedPicture:
    kind = spec.media.kind
    result = prepare_media(_bytes(name, given, kind), spec)
    if result.picture is None:
        raise InvalidRequest(f"{name} {result.problem}", param=PARAM)
    return result.picture


def _bytes(name: str, picture: Any, kind: MediaKind) -> bytes:
    if isinstance(picture, bytes | bytearray | memoryview):
        return bytes(picture)
    if isinstance(picture, PathLike):
        try:
            return Path(picture).read_bytes()
        except OSError as error:
            raise InvalidRequest(
                f"{name}: cannot read {fspath(picture)}: {error.strerror}", param=PARAM
            ) from None
    if isinstance(picture, str) and picture.startswith("data:"):
        return read_data_url(picture, name, kind)
    raise InvalidRequest(
        f"{name} must be {_OWN[kind]}, the bytes of a file, a pathlib.Path or a data: URL; got "
        f"{type(picture).__name__}",
        param=PARAM,
    )
