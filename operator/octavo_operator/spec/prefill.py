"""spec.prefill: pods of their own that compute long prompts for the pods that answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo_engine.protocol.sides import SideLimits, SideTargets
from octavo_operator.errors import SpecInvalid
from octavo_operator.spec.autoscaling import AutoscalingSpec, read_prefill_autoscaling
from octavo_operator.spec.engine import DATA_ARG, ResourcesSpec, read_args, read_resources
from octavo_operator.spec.fields import FieldReader, show
from octavo_operator.spec.shared_secret import read_shared_secret

if TYPE_CHECKING:
    from collections.abc import Mapping

# Flags by which the tokens of a prompt or the bits of its KV blocks differ: an engine refuses
# blocks of another one that was started otherwise.
SHARED_ARGS = (
    "activation-bits", "attention-backend", "batch-invariant", "chat-template", "hf-overrides",
    "kernels", "kv-cache-dtype", "load-format", "mm-processor-kwargs", "model-impl", "platform",
    "sim-vocab-size", "speculative-config", "tokenizer", "weight-format",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipSpec:
    """By what clients are to feel pods change sides, and how many are on each at least."""

    targets: SideTargets
    limits: SideLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSpec:
    """What its pods have unlike those that answer. None: as these have it."""

    secret: str  # name of the Secret by which both sides know each other
    replicas: int = 1
    autoscaling: AutoscalingSpec | None = None  # while it is set, replicas is only the start
    flip: FlipSpec | None = None  # None: each pod stays on its side
    resources: ResourcesSpec | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_memory: str | None = None  # a quantity
    args: Mapping[str, str] = field(default_factory=dict)  # beside those of the engine
    node_selector: Mapping[str, str] = field(default_factory=dict)

    @property
    def most_replicas(self) -> int:
        return max(self.replicas, self.autoscaling.max_replicas if self.autoscaling else 0)


def read_prefill(fields: FieldReader, *, most_replicas: int) -> PrefillSpec:
    secret = read_shared_secret(fields, "engines know whom they give KV blocks to")
    autoscaling, resources = fields.optional("autoscaling"), fields.optional("resources")
    flip = fields.optional("flip")
    prefill = PrefillSpec(
        secret=secret,
        replicas=fields.integer("replicas", 1, least=0, most=most_replicas),
        autoscaling=None if autoscaling is None else read_prefill_autoscaling(autoscaling),
        flip=None if flip is None else _read_flip(flip),
        resources=None if resources is None else read_resources(resources),
        max_num_seqs=fields.maybe_integer("maxNumSeqs", least=1, most=65536),
        max_num_batched_tokens=fields.maybe_integer(
            "maxNumBatchedTokens", least=16, most=1_048_576
        ),
        kv_cache_memory=fields.maybe_quantity("kvCacheMemory"),
        args=read_args(fields),
        node_selector=fields.mapping("nodeSelector", _label_value, most=16),
    )
    for name in prefill.args:
        path = f"{fields.at('args')}.{name[:80]}"
        plain = name.removeprefix("no-")
        if plain in SHARED_ARGS:
            raise SpecInvalid(
                path, "must be the same in all pods, or KV blocks are refused; use spec.engine.args"
            )
        if plain == DATA_ARG:
            raise SpecInvalid(path, "must be left out: an engine that serves KV blocks is one core")
    fields.end()
    return prefill


def _read_flip(fields: FieldReader) -> FlipSpec:
    targets = fields.section("targets")
    ttft_s = targets.maybe_duration("ttft", least_s=0.001, most_s=600)
    tpot_s = targets.maybe_duration("tpot", least_s=0.001, most_s=60)
    if ttft_s is None:
        raise targets.fail("ttft", "is required: the time to the first token that is wanted")
    if tpot_s is None:
        raise targets.fail("tpot", "is required: the time for each further token that is wanted")
    targets.end()
    limits = SideLimits(
        prompts=fields.integer("minPrefill", 0, least=0, most=1000),
        answers=fields.integer("minDecode", 1, least=1, most=1000),
    )
    fields.end()
    return FlipSpec(targets=SideTargets(ttft_s, tpot_s), limits=limits)


def _label_value(value: object, path: str) -> str:
    if not isinstance(value, str) or len(value) > 63:
        raise SpecInvalid(
            path,
            f"must be a label's value, of at most 63 characters; got {show(value)} (quote numbers "
            "and booleans)",
        )
    return value
