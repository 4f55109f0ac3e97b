"""Pictures of offline prompts: read, prepared and put into the prompt's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo_engine.core.media.prepare import BadPicture, prepare, prepare_decoded
from octavo_engine.core.media.prompt import PictureTokens, PromptMedia, expand
from octavo_engine.core.media.sources import read_data_url
from octavo_engine.core.media.spec import read_picture_spec
from octavo_engine.errors import InvalidRequest, ModelError, RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.config import EngineConfig
    from octavo_engine.core.info import ModelInfo
    from octavo_engine.core.media.prepare import PreparedPicture
    from octavo_engine.core.media.spec import PictureSpec
    from octavo_engine.tokenization.tokenizer import Tokenizer
    from octavo_engine.weights.source import ModelFiles

PARAM = "multi_modal_data"
_TEXT_MODEL = "this model takes no pictures"


class OfflinePictures:
    """How one model's pictures are prepared; without, why they are refused."""

    def __init__(
        self, config: EngineConfig, info: ModelInfo, files: ModelFiles | None, tokenizer: Tokenizer
    ) -> None:
        self._max_images = config.max_images_per_prompt
        self._spec: PictureSpec | None = None
        self._tokens: PictureTokens | None = None
        self._refusal = _TEXT_MODEL
        if not info.sees or files is None:
            return
        try:
            self._spec = read_picture_spec(files, config.picture_overrides)
            if self._spec is not None:
                self._tokens = PictureTokens(self._spec.media, tokenizer)
        except ModelError as error:
            self._refusal = str(error)

    def put_in(
        self, token_ids: Sequence[int], pictures: Sequence[Any]
    ) -> tuple[list[int], PromptMedia]:
        """The prompt with its pictures. Raises RequestError."""
        if self._spec is None or self._tokens is None:
            raise RequestError(f"{PARAM}: {self._refusal}", param=PARAM, code="not_supported")
        if find_spec("PIL") is None:
            raise RequestError(
                f"{PARAM}: pictures need Pillow; run: pip install pillow",
                param=PARAM, code="not_supported",
            )  # fmt: skip
        if self._max_images is not None and len(pictures) > self._max_images:
            raise InvalidRequest(
                f"{PARAM} holds {len(pictures)} pictures; limit_mm_per_prompt allows "
                f"{self._max_images} in one prompt",
                param=PARAM,
            )
        spec = self._spec.among(len(pictures))
        prepared = [
            _prepared(f"{PARAM}['image'][{number}]", picture, spec)
            for number, picture in enumerate(pictures)
        ]
        return expand(token_ids, prepared, self._tokens, param="prompt")


def pictures_of(prompt: object) -> list[Any]:
    """What a prompt's `multi_modal_data` holds. Raises InvalidRequest."""
    data = prompt.get(PARAM) if isinstance(prompt, Mapping) else None
    if not data:
        return []
    if not isinstance(data, Mapping) or set(data) != {"image"}:
        raise InvalidRequest(
            f"{PARAM} must be a dict with the key image, one picture or a list; video and audio "
            "are not supported",
            param=PARAM,
        )
    pictures = data["image"]
    return list(pictures) if isinstance(pictures, list | tuple) else [pictures]


def _prepared(name: str, picture: Any, spec: PictureSpec) -> PreparedPicture:
    from PIL import Image

    if isinstance(picture, Image.Image):
        try:
            return prepare_decoded(picture, spec)
        except (BadPicture, OSError) as error:  # a file opened and never read may be broken
            raise InvalidRequest(f"{name} {error}", param=PARAM) from None
    result = prepare(_bytes(name, picture), spec)
    if result.picture is None:
        raise InvalidRequest(f"{name} {result.problem}", param=PARAM)
    return result.picture


def _bytes(name: str, picture: Any) -> bytes:
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
        return read_data_url(picture, name)
    raise InvalidRequest(
        f"{name} must be a PIL image, the bytes of a file, a pathlib.Path or a data: URL; got "
        f"{type(picture).__name__}",
        param=PARAM,
    )
