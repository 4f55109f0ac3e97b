"""How large and how costly a request's grammar may be."""

from __future__ import annotations

from dataclasses import dataclass

from llguidance import LLParserLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """Generous for people, tight for bombs."""

    max_schema_bytes: int = 1 << 20
    max_schema_depth: int = 32  # of schemas within schemas; references do not count
    max_schema_nodes: int = 8192
    max_enum: int = 8192
    max_branches: int = 256  # of anyOf, oneOf, allOf
    max_choices: int = 1024
    max_regex_bytes: int = 4 << 10
    max_grammar_bytes: int = 8 << 10
    max_ebnf_bytes: int = 32 << 10  # before it is translated, with its comments; of all in a tag
    max_tags: int = 256  # of a structural tag, with all that is inside
    max_after_bytes: int = 256
    # What a compilation and a step may burn, in llguidance's units: a fifth of a second, and some
    # ten milliseconds.
    initial_lexer_fuel: int = 150_000
    step_lexer_fuel: int = 100_000
    step_max_items: int = 50_000
    max_lexer_states: int = 20_000
    max_grammar_size: int = 200_000

    def parser_limits(self) -> LLParserLimits:
        return LLParserLimits(
            initial_lexer_fuel=self.initial_lexer_fuel,
            step_lexer_fuel=self.step_lexer_fuel,
            step_max_items=self.step_max_items,
            max_lexer_states=self.max_lexer_states,
            max_grammar_size=self.max_grammar_size,
            verbose_errors=False,
        )


DEFAULT_LIMITS = GrammarLimits()
