"""Requests of five kinds, made from a seed: the same ones on every machine.

One topic in eight is kept for measuring, so that heads are never measured on what they were trained
on.
"""

from __future__ import annotations

import random
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

KINDS = ("chat", "code", "json", "summaries", "random")
HELD_OUT = 8  # one topic in so many
RANDOM_TOKENS = 48  # of a prompt of noise
_PASSAGES = Path(__file__).parent.parent / "perplexity.txt"
_PAGES = Path(__file__).parent.parent.parent / "docs"


class Request(NamedTuple):
    kind: str
    content: str  # of the user's message
    schema: dict[str, Any] | None = None  # of the answer
    token_ids: tuple[int, ...] = ()  # instead of a message


def _listed(names: str) -> tuple[str, ...]:
    return tuple(names.split(","))


TOPICS = _listed(
    "tides,glaciers,bread,chess,vaccines,bridges,honeybees,inflation,volcanoes,jazz,photosynthesis,"
    "the printing press,coral reefs,insurance,satellites,the Roman Empire,gravity,coffee,libraries,"
    "earthquakes,recycling,the human heart,bicycles,electric cars,public speaking,sleep,tea,"
    "the Silk Road,black holes,gardening,budgeting,wind power,whales,penicillin,maps,clocks,"
    "democracy,rainforests,steam engines,mountain climbing,negotiation,the moon,memory,glass,"
    "migration of birds,cheese,the violin,time zones,the internet,deserts,dreams,soil,batteries,"
    "lighthouses,marathon running,folk tales,rice,tunnels,dinosaurs,first aid,paper,winter,"
    "spiders,comets"
)
_CHAT = (
    "What is the most important thing to know about {}?",
    "Explain {} to a child.",
    "Give me five facts about {}.",
    "Why does {} matter today? Answer in two paragraphs.",
    "I have to give a short talk about {}. How should I begin?",
    "What are the advantages and disadvantages of learning about {}?",
    "Write a short story about {}.",
    "Compare {} with {other}.",
)
TASKS = _listed(
    "reverses a string,checks whether a number is prime,computes the factorial of n,"
    "merges two sorted lists,counts the words in a text,finds the largest item of a list,"
    "removes duplicates from a list,returns the n-th Fibonacci number,sorts a list of dicts by key,"
    "checks whether a word is a palindrome,converts Celsius to Fahrenheit,flattens a nested list,"
    "parses a line of CSV,computes the greatest common divisor,does a binary search,"
    "counts the vowels of a word,reads a file and returns its lines,groups words by first letter,"
    "transposes a matrix,computes the mean and the median,validates an e-mail address,"
    "implements a stack,implements a queue,rotates a list by k places,finds the common prefix,"
    "converts a number to binary,caches results of another function,sums the digits of a number,"
    "generates all permutations,finds the second largest number,counts characters in a string,"
    "formats a date"
)
_CODE = (
    "Write a Python function that {}.",
    "Write a JavaScript function that {}, with comments.",
    "Write a Python function that {}, and a test for it.",
    "Show me Java code that {}.",
    "Write a Go function that {}.",
    "How do I write C++ code that {}?",
    "I need a Rust function that {}. Explain it, too.",
    "Write a Python class with a method that {}.",
)
_OBJECTS: dict[str, dict[str, Any]] = {
    "a book": {"title": "string", "author": "string", "year": "integer", "pages": "integer"},
    "a person": {"name": "string", "age": "integer", "city": "string", "email": "string"},
    "a recipe": {"name": "string", "minutes": "integer", "ingredients": "array"},
    "an event": {"title": "string", "date": "string", "place": "string", "guests": "integer"},
    "a product": {"name": "string", "price": "number", "in_stock": "boolean", "tags": "array"},
    "a course": {"title": "string", "teacher": "string", "weeks": "integer", "topics": "array"},
}
_JSON = (
    "Make up {} about {} and describe it as JSON.",
    "Return {} that has to do with {}, as a JSON object.",
)
_SUMMARIES = (
    "Summarise this text:\n\n{}",
    "Summarise the following passage in two sentences.\n\n{}",
    "What are the main points of this text?\n\n{}",
)


def requests(
    kind: str, count: int, *, seed: int, held_out: bool, vocab_size: int = 0
) -> list[Request]:
    """So many of one kind. `vocab_size` is for tokens of noise."""
    rng = random.Random(f"{kind} {seed}")
    if kind == "random":
        return [Request(kind, "", token_ids=tuple(_noise(rng, vocab_size))) for _ in range(count)]
    make = {"chat": _chat, "code": _code, "json": _json, "summaries": _summary}[kind]
    return [make(rng, held_out=held_out) for _ in range(count)]


def _choose(rng: random.Random, items: Sequence[str], *, held_out: bool) -> str:
    return rng.choice(
        [item for i, item in enumerate(items) if (i % HELD_OUT == HELD_OUT - 1) == held_out]
    )


def _chat(rng: random.Random, *, held_out: bool) -> Request:
    topic, other = (_choose(rng, TOPICS, held_out=held_out) for _ in range(2))
    return Request("chat", rng.choice(_CHAT).format(topic, other=other))


def _code(rng: random.Random, *, held_out: bool) -> Request:
    return Request("code", rng.choice(_CODE).format(_choose(rng, TASKS, held_out=held_out)))


def _json(rng: random.Random, *, held_out: bool) -> Request:
    name, fields = rng.choice(list(_OBJECTS.items()))
    topic = _choose(rng, TOPICS, held_out=held_out)
    return Request("json", rng.choice(_JSON).format(name, topic), schema=schema_of(fields))


def schema_of(fields: dict[str, str]) -> dict[str, Any]:
    """An object of short fields, all of them wanted."""
    lengths: dict[str, dict[str, Any]] = {
        "string": {"maxLength": 60},
        "array": {"items": {"type": "string", "maxLength": 40}, "minItems": 2, "maxItems": 5},
    }
    return {
        "type": "object",
        "properties": {name: {"type": of, **lengths.get(of, {})} for name, of in fields.items()},
        "required": list(fields),
        "additionalProperties": False,
    }


def _summary(rng: random.Random, *, held_out: bool) -> Request:
    passage = _choose(rng, passages(), held_out=held_out)
    return Request("summaries", rng.choice(_SUMMARIES).format(passage))


@cache
def passages() -> tuple[str, ...]:
    """Prose of this repository, of some sentences each."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(_PAGES.glob("*.md"))]
    found = _PASSAGES.read_text(encoding="utf-8").split("\n\n")
    for text in texts:
        paragraphs = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE).split("\n\n")
        found += [" ".join(one.split()) for one in paragraphs if one[:1].isalpha()]
    return tuple(one.strip() for one in found if 300 <= len(one) <= 1500)


def _noise(rng: random.Random, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(RANDOM_TOKENS)]
