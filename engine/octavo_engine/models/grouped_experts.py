"""Settings of experts that are chosen by groups: DeepSeek's, and those of the models that took them
over."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo_engine.models.latent_config import read_latent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.models.block import BlockConfig
    from octavo_engine.models.fields import ConfigFields


class ExpertChoice(NamedTuple):
    """How experts are chosen where it is not by a softmax of all scores alone."""

    is_sigmoid: bool = False
    has_bias: bool = False  # of the choice, learned
    num_groups: int = 1
    top_groups: int = 1
    best_of_group: int = 1  # scores that a group is judged by
    scale: float = 1.0  # of the weights


MAX_GROUPS = 1024


def read_routing(fields: ConfigFields, num_experts: int) -> ExpertChoice:
    """By `topk_method`: greedy, group_limited_greedy, or noaux_tc."""
    method = fields.text("topk_method")
    scale = fields.positive("routed_scaling_factor")
    if method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        raise fields.error("topk_method", "must be greedy, group_limited_greedy or noaux_tc")
    is_sigmoid = method == "noaux_tc"
    scoring = fields.optional_text("scoring_func")
    if is_sigmoid and scoring == "noaux_tc":  # dots.llm1 writes the method there too
        scoring = "sigmoid"
    if scoring is not None and scoring != ("sigmoid" if is_sigmoid else "softmax"):
        raise fields.error("scoring_func", "must be sigmoid with noaux_tc, and softmax else")
    if method == "greedy":
        return ExpertChoice(scale=scale)
    num_groups = fields.optional_integer("n_group", maximum=MAX_GROUPS) or 1
    top_groups = fields.optional_integer("topk_group", maximum=MAX_GROUPS) or 1
    if num_experts % num_groups:
        raise fields.error("n_group", f"must divide {num_experts} experts")
    if top_groups > num_groups:
        raise fields.error("topk_group", f"must be at most n_group, {num_groups}")
    return ExpertChoice(
        is_sigmoid=is_sigmoid,
        has_bias=is_sigmoid,
        num_groups=num_groups,
        top_groups=top_groups,
        best_of_group=2 if is_sigmoid else 1,
        scale=scale,
    )


def read_deepseek(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    return read_latent(fields)


def read_glm_moe(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    if not fields.boolean("use_qk_norm"):
        return {}
    return {"block": dataclasses.replace(block, qk_norm="head")}
