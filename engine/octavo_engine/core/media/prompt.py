"""Pictures in a prompt of token ids: each placeholder becomes what stands for its picture, with as
many tokens as a tile has rows where its rows are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.errors import InvalidRequest, ModelError
from octavo_engine.state.media import MediaItem, MediaSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.core.media.prepare import PreparedPicture
    from octavo_engine.models.vision_config import MediaConfig
    from octavo_engine.tokenization.tokenizer import Tokenizer

_FAKE, _IMAGE, _WHOLE = "<fake_token_around_image>", "<image>", "<global-img>"  # of Idefics 3
_BEFORE, _BEHIND = "<img>", "</img>"  # of InternVL
_LINE_END, _PICTURE_END = "[IMG_BREAK]", "[IMG_END]"  # of Pixtral, behind lines of rows
_NEWLINES = 2  # before and behind a picture of Gemma 3


class PicturePlace(NamedTuple):
    """Tokens [first, end) of a prompt stand for a picture, and one in the rendered text."""

    first: int
    end: int
    placeholder: int


class PromptMedia(NamedTuple):
    """The pictures of one prompt."""

    spans: tuple[MediaSpan, ...]  # of tiles
    items: tuple[MediaItem, ...]  # each tile once
    places: tuple[PicturePlace, ...]  # of pictures, with the tokens around their tiles


class PictureTokens:
    """What stands for a picture in prompts of one model. Raises ModelError where the tokenizer
    lacks its tokens."""

    def __init__(self, media: MediaConfig, tokenizer: Tokenizer) -> None:
        self.media = media
        self.placeholder = media.token_id if media.edges is None else media.edges[0]
        self._tokenizer = tokenizer
        self._ends: tuple[int, int] | None = None  # around all tiles of a picture
        self._line_ends: tuple[int, int] | None = None  # behind each line, and behind the last
        if media.family == "internvl":
            self._ends = self._only(_BEFORE), self._only(_BEHIND)
        if media.ends_lines:
            self._line_ends = self._only(_LINE_END), self._only(_PICTURE_END)
        if media.family != "idefics3":
            return
        fake = self._encoded(_FAKE)
        if self._encoded(_IMAGE) != [media.token_id] or tokenizer.token_name(fake[0]) != _FAKE:
            raise ModelError(
                f"the tokenizer must have the tokens {_FAKE} and {_IMAGE}, the latter as "
                f"{media.token_id}, which config.json gives as image_token_id"
            )

    def around_tiles(self, picture: PreparedPicture) -> list[int]:
        """The tokens, with one of its rows for each tile."""
        if self._ends is not None:
            return [self._ends[0], *[self.media.token_id] * len(picture.tiles), self._ends[1]]
        if self.media.edges is not None:
            return [self.media.edges[0], self.media.token_id, self.media.edges[1]]
        if self.media.family != "idefics3":
            return [self.media.token_id]
        text = ""
        for row in range(1, picture.rows + 1):
            for column in range(1, picture.columns + 1):
                text += f"{_FAKE}<row_{row}_col_{column}>{_IMAGE}"
            text += "\n"
        if picture.rows:
            text += "\n"
        return self._encoded(f"{text}{_FAKE}{_WHOLE}{_IMAGE}{_FAKE}")

    def of_tile(self, tile: MediaItem, first: int) -> tuple[list[int], MediaSpan]:
        """Its rows from token `first` of a prompt on, with what stands behind each line."""
        media, token = self.media, self.media.token_id
        lines = media.lines_of(tile)
        ids = [token] * media.rows_of(tile)
        if self._line_ends is not None and lines is not None:
            line_end, end = self._line_ends
            ids = [*([*[token] * lines[1], line_end] * lines[0])[:-1], end]
        span = MediaSpan(
            tile.digest, first, len(ids), kind=media.kind, is_two_way=media.is_two_way,
            grid=lines if media.has_axes else None,
            line_rows=lines[1] if media.ends_lines and lines else 0,
        )  # fmt: skip
        return ids, span

    def with_newlines(self, ids: Sequence[int]) -> list[int]:
        """The prompt with the newlines that stand around pictures. They become one token with those
        that are there: a text is read with them, not beside them."""
        if self.media.family != "gemma3":
            return list(ids)
        written: list[int] = []
        run: list[int] = []  # tokens of newlines that are read and not yet written
        behind = 0  # newlines that the picture before them brings
        for token in ids:
            spelled = self._tokenizer.token_bytes(token)
            if spelled and not spelled.strip(b"\n"):
                run.append(token)
                continue
            before = _NEWLINES if token == self.placeholder else 0
            written += self._joined(run, behind + before)
            written.append(token)
            run, behind = [], before
        return written + self._joined(run, behind)

    def _joined(self, run: list[int], more: int) -> list[int]:
        """Tokens of newlines and so many more."""
        if not more:
            return run
        count = sum(len(self._tokenizer.token_bytes(token)) for token in run)
        return self._encoded("\n" * (count + more))

    def _only(self, token: str) -> int:
        ids = self._encoded(token)
        if len(ids) != 1 or self._tokenizer.token_name(ids[0]) != token:
            raise ModelError(f"the tokenizer must have the token {token}, which pictures need")
        return ids[0]

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def expand(
    ids: Sequence[int], pictures: Sequence[PreparedPicture], tokens: PictureTokens, *,
    param: str = "messages",
) -> tuple[list[int], PromptMedia]:  # fmt: skip
    """The prompt with its placeholders expanded. Raises InvalidRequest where there are not as many
    as pictures."""
    count = sum(token == tokens.placeholder for token in ids)
    if count != len(pictures):
        raise InvalidRequest(
            f"{param}: the prompt has places for {count} {tokens.media.noun}, but {len(pictures)} "
            "were sent; "
            f"each needs one placeholder (token {tokens.placeholder}), which a chat template "
            "writes",
            param=param,
        )
    expanded: list[int] = []
    spans: list[MediaSpan] = []
    places: list[PicturePlace] = []
    following = iter(pictures)
    for token in tokens.with_newlines(ids):
        if token != tokens.placeholder:
            expanded.append(token)
            continue
        first, picture = len(expanded), next(following)
        tiles = iter(picture.tiles)
        for inner in tokens.around_tiles(picture):
            if inner != tokens.media.token_id:
                expanded.append(inner)
                continue
            rows, span = tokens.of_tile(next(tiles), len(expanded))
            spans.append(span)
            expanded += rows
        places.append(PicturePlace(first, len(expanded), token))
    unique = {tile.digest: tile for picture in pictures for tile in picture.tiles}
    return expanded, PromptMedia(tuple(spans), tuple(unique.values()), tuple(places))
