"""A tokenizer over the `tokenizers` library, and the care that untrusted text needs on top of it.

Text from users may spell control tokens, and `tokenizers` would turn it into control ids. So such
text goes through a twin that shares the vocabulary but takes special tokens for plain text. In a
chat the template's own control tokens must still count: strings of the messages that look like one
are broken with a private character before rendering, the result is cut at the control tokens that
are whole, and the pieces between go through the twin with that character removed.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import pre_tokenizers

from octavo_engine.errors import InvalidRequest, is_failure
from octavo_engine.tokenization.chat_template import ChatTemplate
from octavo_engine.tokenization.length import LeastTokens
from octavo_engine.tokenization.threads import INLINE_CHARS
from octavo_engine.tokenization.token_pieces import piece_rules
from octavo_engine.tokenization.tokenizer import check_length

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tokenizers import AddedToken

    from octavo_engine.tokenization.tokenizer import Template


class TextTokenizer:
    """Text to ids and back for one model."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        where: str,
        eos_token_ids: Sequence[int] = (),
        bos_token_id: int | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._rules = piece_rules(tokenizer, where)
        self._added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        self._pieces: dict[int, bytes] = {}
        self.vocab_size = max(tokenizer.get_vocab_size(), max(self._added, default=-1) + 1)
        self.eos_token_ids = tuple(i for i in eos_token_ids if i >= 0)
        self.bos_token_id = bos_token_id
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.chat_template = chat_template
        self.least_tokens = LeastTokens(tokenizer, self._added.values(), self._rules.spelling)
        self.strips_first_space = self._rules.strips_first_space
        self._special = _SpecialTokens({i: self._added[i] for i in sorted(self.special_ids)})
        self._plain = _twin(tokenizer, self._added, first=True)
        self._plain_inside = _twin(tokenizer, self._added, first=False)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]:
        if allow_special or not self._special.found_in(text):
            return _encode(self._tokenizer, text, add_special_tokens)
        ids = _encode(self._plain, text, False)
        return self._with_ends(ids) if add_special_tokens else ids

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        try:
            encodings = self._tokenizer.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        except BaseException as error:
            if not is_failure(error):
                raise
            # Each alone says what is wrong.
            return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        return [list(encoding.ids) for encoding in encodings]

    def encode_parts(
        self, first: str, second: str | None = None, *, max_length: int | None = None
    ) -> tuple[list[int], list[int]]:
        parts = [_encoding(self._tokenizer, first)]
        if second is not None:
            parts.append(_encoding(self._tokenizer, second))
        if max_length is not None:
            room = max_length - self._tokenizer.num_special_tokens_to_add(second is not None)
            for part, kept in zip(parts, _shares([len(p) for p in parts], room), strict=True):
                part.truncate(kept)
        pair = parts[1] if second is not None else None
        whole = self._tokenizer.post_process(parts[0], pair, True)
        return list(whole.ids), list(whole.type_ids)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        if self.chat_template is None:
            raise InvalidRequest("this model has no chat template", param="messages")
        _, ids = self.render_chat(
            messages,
            template=self.chat_template,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            continue_final_message=continue_final_message,
            **kwargs,
        )
        return ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: Template,
        add_special_tokens: bool = False,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        max_tokens: int | None = None,
        **kwargs: Any,
    ) -> tuple[str, list[int]]:
        assert isinstance(template, ChatTemplate)  # every template of a real vocabulary is one
        guard = _Guard(self._special, (messages, tools, kwargs))
        text = template.render_guarded(
            messages,
            guard=guard.apply,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            continue_final_message=continue_final_message,
            **kwargs,
        )
        if max_tokens is not None:
            check_length(self, text, max_tokens, "messages")
        if not guard.was_needed:
            return text, _encode(self._tokenizer, text, add_special_tokens)
        ids = self._encode_guarded(text, guard)
        return guard.remove(text), self._with_ends(ids) if add_special_tokens else ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"token id {token_id} is outside the vocabulary of {self.vocab_size}",
                    param="tokens",
                )
        skipped = self.special_ids if skip_special_tokens else frozenset()
        raw = b"".join([self.token_bytes(i) for i in ids if i not in skipped])
        if self.strips_first_space:
            raw = raw.removeprefix(b" ")
        return raw.decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_name(self, token_id: int) -> str:
        known = 0 <= token_id < self.vocab_size
        return (self._tokenizer.id_to_token(token_id) or "") if known else ""

    def token_bytes(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            # A model's table may be padded beyond the vocabulary: such ids stand for nothing.
            known = 0 <= token_id < self.vocab_size
            token = self._tokenizer.id_to_token(token_id) if known else None
            piece = b"" if token is None else self._rules.to_bytes(token)
            if known:
                self._pieces[token_id] = piece
        return piece

    def _with_ends(self, ids: list[int]) -> list[int]:
        """The ids with what the post-processor puts around any text."""
        around = _encode(self._tokenizer, "", True)
        begins = 1 if around[:1] == [self.bos_token_id] else 0
        return [*around[:begins], *ids, *around[begins:]]

    def _encode_guarded(self, text: str, guard: _Guard) -> list[int]:
        ids: list[int] = []
        position = 0
        for begin, end, token_id in self._special.spans(text):
            ids += self._encode_between(text[position:begin], guard, first=position == 0)
            ids.append(token_id)
            position = end
        return ids + self._encode_between(text[position:], guard, first=position == 0)

    def _encode_between(self, text: str, guard: _Guard, *, first: bool) -> list[int]:
        twin = self._plain if first else self._plain_inside
        return _encode(twin, guard.remove(text), False) if text else []


class _SpecialTokens:
    """Finds control tokens in text as `tokenizers` would."""

    def __init__(self, tokens: Mapping[int, AddedToken]) -> None:
        self._by_text = {t.content: t for t in tokens.values() if t.content}
        self._ids = {t.content: i for i, t in tokens.items()}
        longest_first = sorted(self._by_text, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = {text[:i] for text in self._by_text for i in range(1, len(text))}
        self._longest = max(map(len, self._by_text), default=0)

    def found_in(self, text: str) -> bool:
        return self._pattern.search(text) is not None

    def broken(self, text: str, mark: str) -> str:
        """The text with `mark` inside every control token, and after an end that begins one."""
        text = self._pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)
        tail = range(1, min(self._longest, len(text) + 1))
        if any(text[-n:] in self._beginnings for n in tail):
            text += mark
        return text

    def spans(self, text: str) -> Iterator[tuple[int, int, int]]:
        """(begin, end, id) of each, with the white space that it swallows."""
        done = 0
        for match in self._pattern.finditer(text):
            token = self._by_text[match[0]]
            begin, end = match.span()
            if token.single_word and (_is_word(text, begin - 1) or _is_word(text, end)):
                continue
            if token.lstrip:
                begin = max(done, len(text[:begin].rstrip()))
            if token.rstrip:
                end = len(text) - len(text[end:].lstrip())
            done = end
            yield begin, end, self._ids[match[0]]


class _Guard:
    """Breaks look-alikes of control tokens in one conversation's strings."""

    def __init__(self, special: _SpecialTokens, given: Any) -> None:
        self._special = special
        self._given = given
        self._mark: str | None = None

    @property
    def was_needed(self) -> bool:
        return self._mark is not None

    def apply(self, text: str) -> str:
        # Seldom needed, so the private character is looked for only when it is.
        if self._mark is not None:
            return self._special.broken(text, self._mark)
        if self._special.broken(text, "\ufdd0") == text:
            return text
        self._mark = _unused_character(self._given)
        return self._special.broken(text, self._mark)

    def remove(self, text: str) -> str:
        return text if self._mark is None else text.replace(self._mark, "")


def _unused_character(given: Any) -> str:
    """A private-use character that occurs nowhere in the conversation."""
    used = set(json.dumps(given, ensure_ascii=False, default=str))
    return next(c for c in map(chr, range(0xF0000, 0x10FFFE)) if c not in used)


def _twin(
    tokenizer: tokenizers.Tokenizer, added: Mapping[int, AddedToken], *, first: bool
) -> tokenizers.Tokenizer:
    """The same vocabulary (shared, not copied), with special tokens read as text."""
    twin = tokenizers.Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        twin.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        twin.pre_tokenizer = (
            tokenizer.pre_tokenizer if first else _without_prefix(tokenizer.pre_tokenizer)
        )
    # In order of ids, so that each gets its own again; at once, as each call reads all anew.
    twin.add_tokens([added[token_id] for token_id in sorted(added)])
    twin.encode_special_tokens = True
    return twin


def _without_prefix(pre_tokenizer: Any) -> Any:
    """`Metaspace` puts a space before the first piece of a text only; this is for the others."""
    fields = json.loads(pre_tokenizer.__getstate__())
    if fields.get("type") == "Metaspace" and fields.get("prepend_scheme") == "first":
        return pre_tokenizers.Metaspace(
            replacement=fields["replacement"], prepend_scheme="never", split=fields["split"]
        )
    return pre_tokenizer


def _encode(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    try:
        if len(text) <= INLINE_CHARS:
            return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        # As a batch of one: that holds no lock while it reads, and does not work out offsets.
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)
    except BaseException as error:
        raise _refusal(error, "prompt") from None


def _refusal(error: BaseException, param: str) -> BaseException:
    """The library raises nothing narrower where a vocabulary has no token for unknown text."""
    if not is_failure(error):
        return error
    if isinstance(error, UnicodeEncodeError | TypeError):
        # Lone surrogates: JSON can spell them, UTF-8 cannot.
        return InvalidRequest("the text is not valid Unicode", param=param)
    return InvalidRequest(f"the model's tokenizer cannot encode the text: {error}", param=param)


def _encoding(tokenizer: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    try:
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return encoding
    except BaseException as error:
        raise _refusal(error, "input") from None


def _shares(lengths: Sequence[int], room: int) -> list[int]:
    """How much of each of one or two texts is kept: the longer one is cut first."""
    room = max(room, 0)
    if sum(lengths) <= room:
        return list(lengths)
    if len(lengths) == 1:
        return [room]
    short = min(lengths)
    kept = min(short, room // 2)  # of the shorter one
    return [kept, room - kept] if lengths[0] <= lengths[1] else [room - kept, kept]


def _is_word(text: str, position: int) -> bool:
    return 0 <= position < len(text) and (text[position].isalnum() or text[position] == "_")
