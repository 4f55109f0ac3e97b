"""What an answer must be, as Python programs say it: one keyword, one grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_engine.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.state.grammar import GrammarSpec


def structured_output(
    *,
    json: dict[str, Any] | bool | None = None,
    json_object: bool = False,
    regex: str | None = None,
    choice: Sequence[str] | None = None,
    grammar: str | None = None,
    structural_tag: dict[str, Any] | str | None = None,
) -> GrammarSpec:
    """For `SamplingParams(grammar=…)`: exactly one of a JSON schema, any JSON object, a regular
    expression, a list of texts, a grammar (EBNF, GBNF or Lark) or a structural tag.

    Checked at once. Raises InvalidRequest.

    >>> SamplingParams(grammar=structured_output(choice=["yes", "no"]))
    """
    from octavo_engine.grammar import normal
    from octavo_engine.grammar.check import check

    makers: list[GrammarSpec] = []
    if json is not None:
        makers.append(normal.json_schema_spec(json))
    if json_object:
        makers.append(normal.json_object_spec())
    if regex is not None:
        makers.append(normal.regex_spec(regex))
    if choice is not None:
        makers.append(normal.choice_spec(list(choice)))
    if grammar is not None:
        makers.append(normal.grammar_spec(grammar))
    if structural_tag is not None:
        makers.append(normal.structural_tag_spec(structural_tag))
    if len(makers) != 1:
        raise InvalidRequest(
            "give exactly one of json, json_object, regex, choice, grammar and structural_tag",
            param="grammar",
        )
    check(makers[0])
    return makers[0]
