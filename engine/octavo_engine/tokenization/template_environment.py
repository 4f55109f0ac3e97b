"""The sandbox that chat templates run in: Hugging Face's dialect, without a way out or up.

A template comes with the model's files and so from strangers. It sees plain values only; names that
begin with an underscore, mutation, and filters it has no use for are refused; what it may repeat,
raise or count to is bounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from octavo_engine.tokenization import template_bounds as bounds

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from jinja2.compiler import Frame
    from jinja2.parser import Parser
    from jinja2.runtime import Context

MAX_REPEATED = 1 << 20  # characters or items that one `*` may make, and numbers in all ranges
MAX_EXPONENT = 64
_FILTERS = frozenset(
    (
        "abs", "batch", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first",
        "float", "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower",
        "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round", "safe",
        "select", "selectattr", "slice", "sort", "string", "sum", "title", "tojson", "trim",
        "truncate", "unique", "upper", "urlencode", "wordcount",
    )
)  # fmt: skip


# Of built-in types: what neither changes a value nor makes much of little.
_METHODS: Final[tuple[tuple[type, frozenset[str]], ...]] = (
    (str, frozenset((
        "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha",
        "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable",
        "isspace", "istitle", "isupper", "join", "lower", "lstrip", "partition", "removeprefix",
        "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split",
        "splitlines", "startswith", "strip", "swapcase", "title", "upper",
    ))),
    (dict, frozenset(("copy", "get", "items", "keys", "values"))),
    (list, frozenset(("copy", "count", "index"))),
    (tuple, frozenset(("count", "index"))),
    (bytes, frozenset()), (int, frozenset()), (float, frozenset(("is_integer",))),
    (range, frozenset(("count", "index"))),
)  # fmt: skip


class _BoundedGenerator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """`~`, through the environment."""
        self.write("environment.concatenate((")
        for arg in node.nodes:
            self.visit(arg, frame)
            self.write(", ")
        self.write("))")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Made once per template; holds nothing of a request."""

    intercepted_binops = frozenset(("*", "**", "%", "+"))
    code_generator_class = _BoundedGenerator
    concat = staticmethod(bounds.joined)  # of what a block writes
    tick = staticmethod(bounds.tick)

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock],
            finalize=bounds.shown,
            optimized=False,  # it takes seconds for a long chain of filters, and saves microseconds
        )  # fmt: skip
        filters = {k: v for k, v in self.filters.items() if k in _FILTERS} | {"tojson": _tojson}
        self.filters = {k: bounds.bounded_filter(k, v) for k, v in filters.items()}
        self.globals = {
            "dict": _make_dict,
            "namespace": _PlainNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": lambda format: now().strftime(str(format)[:200]),
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """With a look at the clock at each turn of a loop."""
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            look = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(look).set_lineno(loop.lineno))
        return template

    def concatenate(self, values: tuple[Any, ...]) -> str:
        for value in values:
            bounds.shown(value)
        return bounds.joined(map(str, values))

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        bounds.tick()
        if obj is bounds.tick:
            return None
        return super().call(context, obj, *bounds.check_method(obj, args), **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sequences = [v for v in (left, right) if isinstance(v, (str, list, tuple))]
        if operator == "*" and sequences:
            count = left if sequences[0] is right else right
            if isinstance(count, int) and len(sequences[0]) * count > MAX_REPEATED:
                raise SecurityError(f"the template repeats something {count} times")
        elif operator == "**" and not (abs(right) <= MAX_EXPONENT and abs(left) < 1 << 32):
            raise SecurityError("the template raises too large a power")
        elif operator == "%" and isinstance(left, str):
            raise SecurityError("the template formats with %")
        elif operator == "*":
            bounds.check_product(left, right)
        elif operator == "+":
            bounds.check_sum(left, right)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # Padding to a width is the short way to fill the memory; no chat template needs it.
        for kind, methods in _METHODS:
            if isinstance(obj, kind):
                return attr in methods
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """`format` pads as well: it is no safe attribute."""


class _GenerationBlock(Extension):
    """{% generation %} marks what to train on; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own way to declare it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _PlainNamespace(Namespace):
    """Refuses names with an underscore in front when they are stored too."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        for name in dict(*rest, **kwargs):
            _check_name(name)
        Namespace.__init__(self, *rest, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the template stores the name {name!r}")


class CountedRange:
    """`range` for one rendering: all ranges together have so many numbers, however they nest."""

    def __init__(self) -> None:
        self._left = MAX_REPEATED

    def __call__(self, *bounds: int) -> range:
        numbers = range(*bounds)
        self._left -= len(numbers) + 1
        if self._left < 0:
            raise SecurityError(f"the template counts more than {MAX_REPEATED} numbers")
        return numbers


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own escapes HTML, which no model was trained on."""
    if indent is not None and indent > 16:
        raise SecurityError("the template indents JSON by more than 16")
    return bounds.encoded(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
