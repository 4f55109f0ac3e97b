"""The language that an answer must belong to, as it crosses the process boundary."""

from __future__ import annotations

from typing import Literal

import msgspec

GrammarKind = Literal["json_schema", "regex", "choice", "lark", "structural_tag"]


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A grammar as a request brings it, in one normal form: equal specs share what is compiled.

    `text` is, by kind: the JSON schema; the regular expression; a JSON list of strings; the grammar
    in Lark's notation (EBNF of other engines is translated before); the structural tag's JSON.
    """

    kind: GrammarKind
    text: str
    any_whitespace: bool = True  # of json_schema: between tokens, within bounds
    whitespace: str = ""  # a regular expression for what may stand there instead
    # Keywords of the request's own schema that `text` is without: no grammar enforces them.
    left_over: tuple[str, ...] = ()
    # The grammar begins once this text has been generated, such as "</think>"; None: at once.
    after: str | None = None
    budget: int | None = None  # tokens that there are for that; then `after` is written for it
    # `budget` counts from one of these, with which the answer begins; where it does not, nothing is
    # waited for. Empty: from the first token.
    opens: tuple[str, ...] = ()
