"""Constraints on answers: grammars, regular expressions and JSON schemas, by `llguidance`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from ._text import TextCodec, imported


class Constraint(Protocol):
    """Limits the next token."""

    def mask(self) -> bytes:
        """A bit for each token that may follow, the lowest of each byte first."""

    def accept(self, token: int) -> None:
        """Takes the token that was chosen."""


class GrammarTokens:
    """The tokens of a model for grammars. It is made once for each model."""

    def __init__(self, codec: TextCodec, vocabulary: int, end_token: int) -> None:
        llguidance = imported("llguidance", "constraints")
        self.tokenizer = llguidance.LLTokenizer(
            codec.source, n_vocab=vocabulary, eos_token=end_token
        )


class GrammarConstraint:
    """A constraint by a grammar of llguidance."""

    def __init__(self, tokens: GrammarTokens, grammar: str) -> None:
        llguidance = imported("llguidance", "constraints")
        self._matcher = llguidance.LLMatcher(tokens.tokenizer, grammar)
        self._check("the grammar")

    def mask(self) -> bytes:
        mask: bytes = self._matcher.compute_bitmask()
        self._check("the grammar after the answer so far")
        return mask

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check(f"token {token}")

    def _check(self, what: str) -> None:
        if problem := self._matcher.get_error():
            raise ValueError(f"{what}: {problem}")


def grammar_of(
    json_schema: str | Mapping[str, Any] | None, regex: str | None, grammar: str | None
) -> str | None:
    """The grammar of the constraint that was asked for, of which there is at most one."""
    given = [
        name
        for name, value in (("json_schema", json_schema), ("regex", regex), ("grammar", grammar))
        if value is not None
    ]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} were given, expected one of them")
    if not given:
        return None
    matcher = imported("llguidance", "constraints").LLMatcher
    if json_schema is not None:
        schema = json_schema if isinstance(json_schema, str) else json.dumps(json_schema)
        text: str = matcher.grammar_from_json_schema(schema)
    elif regex is not None:
        text = matcher.grammar_from_regex(regex)
    else:
        text = matcher.grammar_from_lark(grammar)
    return text
