"""spec.adapters, spec.lora and LLMAdapter: the LoRA adapters of a model, and room for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo_engine.protocol.kubernetes import ADAPTER_KIND, GROUP, VERSION
from octavo_operator.errors import SpecInvalid
from octavo_operator.spec.fields import FieldReader, show
from octavo_operator.spec.model import LONGEST_URI, NAME_FORM, SERVED_NAME, check_uri
from octavo_operator.spec.traffic import Analysis, read_analysis

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_ADAPTERS = 64  # of a spec; LLMAdapters are as many as there are
MAX_LORAS = 256
MAX_RANK = 256
# Engines get the URI and look for themselves: nothing is mounted or fetched beside them, so that a
# new adapter needs no new pods. A claim that spec.podTemplate mounts is a file:///PATH.
ADAPTER_SCHEMES = ("hf", "s3", "gs", "oci", "http", "https", "file")


@dataclass(frozen=True, slots=True)
class AdapterCanary:
    """A share of the requests for another adapter."""

    of: str  # that adapter's name
    percent: int = 10
    pause_s: float = 300.0  # watched at least
    analysis: Analysis = field(default_factory=Analysis)


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A LoRA on top of the model."""

    name: str  # that clients use
    uri: str
    pinned: bool = False
    canary: AdapterCanary | None = None

    @property
    def is_everywhere(self) -> bool:
        """On every engine: its share of requests must not depend on who has room."""
        return self.pinned or self.canary is not None

    @property
    def lora_path(self) -> str:
        """As engines get it: a path, or what their resolvers understand."""
        return self.uri.removeprefix("file://")


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Room for adapters in each engine."""

    max_loras: int = 16  # in one step
    max_cpu_loras: int | None = None  # in memory; None: four times max_loras
    max_rank: int = 64

    @property
    def slots(self) -> int:
        """Adapters that a router loads on one engine."""
        return self.max_cpu_loras or 4 * self.max_loras


@dataclass(frozen=True, slots=True)
class LLMAdapter:
    """An adapter as a resource of its own."""

    name: str  # of the resource
    namespace: str
    generation: int
    deployment: str  # the LLMDeployment's name, in the same namespace
    adapter: AdapterSpec

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> LLMAdapter:
        """Raises SpecInvalid and nothing else, whatever `body` is."""
        return _read(body, None)

    @classmethod
    def parse_stored(cls, body: Mapping[str, Any]) -> LLMAdapter:
        """The same, but fields of a newer version's schema are no error."""
        return _read(body, [])


def read_adapter(fields: FieldReader) -> AdapterSpec:
    canary = fields.optional("canary")
    adapter = AdapterSpec(
        name=fields.required_text("name", longest=128, pattern=SERVED_NAME, form=NAME_FORM),
        uri=_read_uri(fields),
        pinned=fields.flag("pinned", default=False),
        canary=None if canary is None else _read_canary(canary),
    )
    fields.end()
    return adapter


def check_canaries(adapters: Sequence[AdapterSpec]) -> None:
    """Raises SpecInvalid. The schema says the same."""
    plain = {adapter.name for adapter in adapters if adapter.canary is None}
    tried: set[str] = set()
    for number, adapter in enumerate(adapters):
        if adapter.canary is None:
            continue
        where, of = f"spec.adapters[{number}].canary.of", adapter.canary.of
        if of not in plain:
            raise SpecInvalid(where, "must be an adapter of this list that is no canary itself")
        if of in tried:
            raise SpecInvalid(where, f"{of} has another canary; an adapter can have one")
        tried.add(of)


def read_lora(fields: FieldReader) -> LoraSpec:
    lora = LoraSpec(
        max_loras=fields.integer("maxLoras", 16, least=1, most=MAX_LORAS),
        max_cpu_loras=fields.maybe_integer("maxCpuLoras", least=1, most=65536),
        max_rank=fields.integer("maxRank", 64, least=1, most=MAX_RANK),
    )
    if lora.max_cpu_loras is not None and lora.max_cpu_loras < lora.max_loras:
        raise fields.fail("maxCpuLoras", f"must be at least maxLoras, {lora.max_loras}")
    fields.end()
    return lora


def _read(body: object, unknown: list[str] | None) -> LLMAdapter:
    top = FieldReader(body, ADAPTER_KIND, unknown)
    for name, expected in (("apiVersion", f"{GROUP}/{VERSION}"), ("kind", ADAPTER_KIND)):
        if (found := top.raw(name)) != expected:
            raise SpecInvalid(
                name, f"must be {expected}; got {show(found)}", reason="UnsupportedVersion"
            )
    metadata = FieldReader({} if (found := top.raw("metadata")) is None else found, "metadata")
    top.raw("status")
    spec_value = top.raw("spec")
    if spec_value is None:
        raise SpecInvalid("spec", "is required, with deployment and uri")
    top.end()
    name = metadata.required_text("name", longest=253)
    generation = metadata.raw("generation")
    fields = top.inside(spec_value, "spec")
    adapter = LLMAdapter(
        name=name,
        namespace=metadata.text("namespace", "default", longest=63),
        generation=generation if isinstance(generation, int) else 0,
        deployment=fields.required_text("deployment", longest=63),
        adapter=AdapterSpec(
            name=fields.text("name", longest=128, pattern=f"({SERVED_NAME})?", form=NAME_FORM)
            or name,
            uri=_read_uri(fields),
            pinned=fields.flag("pinned", default=False),
        ),
    )
    fields.end()
    return adapter


def _read_canary(fields: FieldReader) -> AdapterCanary:
    canary = AdapterCanary(
        of=fields.required_text("of", longest=128),
        percent=fields.integer("percent", 10, least=1, most=100),
        pause_s=fields.duration("pause", 300, least_s=0, most_s=86400),
        analysis=read_analysis(fields.section("analysis")),
    )
    fields.end()
    return canary


def _read_uri(fields: FieldReader) -> str:
    uri = fields.required_text("uri", longest=LONGEST_URI)
    check_uri(uri, fields.at("uri"), ADAPTER_SCHEMES)
    return uri
