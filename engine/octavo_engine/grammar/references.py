"""What references make of a JSON schema: values that never end, and patterns that add up."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from octavo_engine.errors import InvalidRequest

PARAM = "response_format"
# Patterns that one text must match at once: whether any text does is found out by a search that
# doubles with each of them.
MAX_PATTERNS = 8
# Levels of schemas within schemas, those behind references included: the compiler recurses, and its
# stack, whose end kills the process, holds some 1,200.
MAX_LEVELS = 512
_ALTERNATIVES = ("anyOf", "oneOf")


def check_references(schema: Any) -> None:
    """Raises InvalidRequest for a schema of which every value holds another one of it without an
    end, for too many levels behind references, and for too many patterns on one text. Others'
    complaints are theirs: what is no schema and what points nowhere passes."""
    graph = _Graph(schema)
    finite = graph.finite()
    if graph.most_levels() > MAX_LEVELS:
        raise InvalidRequest(
            f"the JSON schema has more than {MAX_LEVELS} levels behind its references", param=PARAM
        )
    for where, name in graph.references:
        if name not in finite:
            raise InvalidRequest(
                f"the JSON schema refers to itself without an end (at {where or '/'}): no value "
                "that ends satisfies it",
                param=PARAM,
            )
    if graph.has_patterns and _num_patterns(schema, schema, {}) > MAX_PATTERNS:
        raise InvalidRequest(
            f"the JSON schema has more than {MAX_PATTERNS} patterns that one text must match",
            param=PARAM,
        )


class _Graph:
    """Conditions under which a schema has a value that ends, as clauses without negation: a node
    holds once as many of what it waits for hold as it needs."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._needs: list[int] = []
        self._waiting: dict[int, list[int]] = defaultdict(list)
        self._targets: dict[str, int] = {}  # node of what a reference points to
        self._unread: list[tuple[str, Any, int]] = []
        # By reference, that of the root being empty: levels of its own, and what it refers to.
        self._levels: Counter[str] = Counter()
        self._edges: dict[str, set[str]] = {"": set()}
        self._here, self._level = "", 0
        self.references: list[tuple[str, str]] = []  # place, and what it points to
        self.has_patterns = False

    def finite(self) -> set[str]:
        """Those references that a value which ends can satisfy."""
        self.add(self._root, "")
        while self._unread:
            name, found, node = self._unread.pop()
            self._here = name
            self._waiting[self.add(found, name.removeprefix("#"))].append(node)
        ready = [node for node, needs in enumerate(self._needs) if needs <= 0]
        holds = set(ready)
        while ready:
            for waiting in self._waiting[ready.pop()]:
                self._needs[waiting] -= 1
                if self._needs[waiting] == 0 and waiting not in holds:
                    holds.add(waiting)
                    ready.append(waiting)
        return {name for name, node in self._targets.items() if node in holds}

    def most_levels(self) -> int:
        """An upper bound: of what refers to itself, and of all behind it, each level counts."""
        incoming = Counter(name for names in self._edges.values() for name in names)
        above: Counter[str] = Counter()
        ready = [name for name in self._edges if not incoming[name]]
        left = dict(self._levels)
        most = 0
        while ready:
            name = ready.pop()
            deep = above[name] + left.pop(name, 0)
            most = max(most, deep)
            for target in self._edges[name]:
                above[target] = max(above[target], deep)
                incoming[target] -= 1
                if not incoming[target]:
                    ready.append(target)
        return most + sum(left.values())

    def add(self, schema: Any, where: str) -> int:
        """The node of a schema; what it refers to is added too, once."""
        if not isinstance(schema, dict):
            return self._all([])
        self._level += 1
        self._levels[self._here] = max(self._levels[self._here], self._level)
        node = self._read(schema, where)
        self._level -= 1
        return node

    def _read(self, schema: dict[str, Any], where: str) -> int:
        self.has_patterns |= "pattern" in schema
        parts: list[int] = []
        if isinstance(name := schema.get("$ref"), str):
            self.references.append((where, name))
            parts.append(self._target(name))
        for keyword in ("allOf", *_ALTERNATIVES):
            children = schema.get(keyword)
            if isinstance(children, list):
                nodes = [
                    self.add(child, f"{where}/{keyword}/{at}") for at, child in enumerate(children)
                ]
                parts.append(self._all(nodes) if keyword == "allOf" else self._any(nodes))
        parts.append(self._typed(schema, where))
        return self._all(parts)

    def _typed(self, schema: dict[str, Any], where: str) -> int:
        """Its values of their own: of arrays and objects also what they must hold."""
        members = schema.get("properties")
        members = members if isinstance(members, dict) else {}
        nodes = {name: self.add(child, f"{where}/properties/{name}")
                 for name, child in members.items()}  # fmt: skip
        for name, child in (_dict(schema.get("patternProperties"))).items():
            self.add(child, f"{where}/patternProperties/{name}")
        rest = self.add(schema.get("additionalProperties"), f"{where}/additionalProperties")
        first = schema.get("prefixItems")
        items = [
            self.add(child, f"{where}/prefixItems/{at}")
            for at, child in enumerate(first if isinstance(first, list) else [])
        ]
        item = self.add(schema.get("items"), f"{where}/items")
        kinds = schema.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if "enum" in schema or "const" in schema or set(kinds) - {"object", "array"}:
            return self._all([])
        ways: list[int] = []
        if "object" in kinds:
            required = schema.get("required")
            names = required if isinstance(required, list) else []
            ways.append(self._all([nodes.get(name, rest) for name in map(str, names)]))
        if "array" in kinds:
            least = schema.get("minItems")
            least = least if isinstance(least, int) else 0
            ways.append(self._all([*items[:least], *([item] if least > len(items) else [])]))
        return self._any(ways)

    def _target(self, name: str) -> int:
        self._edges[self._here].add(name)
        self._edges.setdefault(name, set())
        node = self._targets.get(name)
        if node is None:
            found = resolve(self._root, name)  # read later: chains of references may be long
            node = self._targets[name] = self._new(int(found is not None))
            self._unread.append((name, found, node))
        return node

    def _all(self, nodes: list[int]) -> int:
        return self._of(nodes, len(nodes))

    def _any(self, nodes: list[int]) -> int:
        return self._of(nodes, 1)

    def _of(self, nodes: list[int], needs: int) -> int:
        node = self._new(needs)
        for part in nodes:
            self._waiting[part].append(node)
        return node

    def _new(self, needs: int) -> int:
        self._needs.append(needs)
        return len(self._needs) - 1


def resolve(root: Any, reference: str) -> Any:
    """What a JSON pointer behind '#' points to; None: nothing, or it is no pointer."""
    value = root
    if not reference.startswith("#") or (len(reference) > 1 and reference[1] != "/"):
        return None
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
        else:
            return None
    return value


def _num_patterns(schema: Any, root: Any, known: dict[str, int]) -> int:
    """The most patterns that one text must match, here or anywhere inside."""
    most = 0
    pending, seen = [schema], set[int]()
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, dict):
            most = max(most, _together(node, root, known))
            pending += node.values()
        elif isinstance(node, list):
            pending += node
    return most


def _together(node: Any, root: Any, known: dict[str, int]) -> int:
    if not isinstance(node, dict):
        return 0
    number = int("pattern" in node) + int("format" in node)
    if isinstance(name := node.get("$ref"), str):
        if name not in known:
            known[name] = 0  # while it is counted: a circle adds nothing new
            known[name] = _together(resolve(root, name), root, known)
        number += known[name]
    for keyword in ("allOf", *_ALTERNATIVES):
        children = node.get(keyword)
        counts = [_together(child, root, known) for child in children] if (
            isinstance(children, list)) else [0]  # fmt: skip
        number += sum(counts) if keyword == "allOf" else max(counts, default=0)
    return number


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
