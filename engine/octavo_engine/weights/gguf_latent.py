"""What the metadata of latent attention and grouped experts (DeepSeek's) is in config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo_engine.weights.gguf_fields import GGUFFields

_SOFTMAX, _SIGMOID = 1, 2  # of expert_gating_func
# Files of before groups had fields: by the number of experts, as the models' own config.json says.
_GROUPS_OF_OLD_FILES = {160: (8, 3), 256: (8, 4)}


def latent_config(fields: GGUFFields, *, heads: int, layers: int) -> dict[str, Any]:
    """Raises ModelError for variants that no page computes."""
    rope_dim = fields.count("rope.dimension_count")
    # Newer files put what is cached into key_length, and a head's own sizes beside it.
    newer = "_mla" if fields.number("attention.key_length_mla") is not None else ""
    key_length = fields.count(f"attention.key_length{newer}")
    if key_length <= rope_dim:
        raise fields.error(
            f"metadata {fields.prefix}.attention.key_length{newer}, {key_length}, must be above "
            f"rope.dimension_count, {rope_dim}"
        )
    if fields.number("attention.temperature_scale"):
        raise fields.error("queries that are scaled by position are not supported in this family")
    return {
        "kv_lora_rank": fields.count("attention.kv_lora_rank"),
        "q_lora_rank": fields.number("attention.q_lora_rank") or None,
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key_length - rope_dim,
        "v_head_dim": fields.count(f"attention.value_length{newer}"),
        "head_dim": rope_dim,
        "num_key_value_heads": heads,
        "first_k_dense_replace": fields.number("leading_dense_block_count") or 0,
        "n_routed_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
        "n_shared_experts": fields.number("expert_shared_count") or 0,
        "moe_intermediate_size": fields.count("expert_feed_forward_length"),
        "routed_scaling_factor": fields.number("expert_weights_scale") or 1.0,
    } | _routing(fields, layers)


def _routing(fields: GGUFFields, layers: int) -> dict[str, Any]:
    """How experts are chosen, and the class that does it."""
    has_bias = fields.has("exp_probs_b.bias", layer=layers - 1)
    # The first files had softmax only, and no field for it.
    function = fields.number("expert_gating_func") or (_SIGMOID if has_bias else _SOFTMAX)
    renormalises = fields.flag("expert_weights_norm")
    num_groups, top_groups = _groups(fields)
    groups = {"n_group": num_groups, "topk_group": top_groups, "norm_topk_prob": renormalises}
    if function == _SIGMOID and has_bias:
        return groups | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        }
    if function == _SOFTMAX and not has_bias and not renormalises:
        method = "greedy" if num_groups == 1 else "group_limited_greedy"
        return groups | {"topk_method": method, "scoring_func": "softmax"}
    raise fields.error(
        f"experts of expert_gating_func {function} {'with' if has_bias else 'without'} a bias of "
        f"the choice (exp_probs_b) and expert_weights_norm {str(renormalises).lower()} are not "
        "supported; supported are sigmoid (2) with a bias, and softmax (1) with neither"
    )


def _groups(fields: GGUFFields) -> tuple[int, int]:
    if fields.number("expert_group_count") is not None:
        return fields.count("expert_group_count"), fields.count("expert_group_used_count")
    return _GROUPS_OF_OLD_FILES.get(fields.count("expert_count"), (1, 1))


def yarn_magnitudes(fields: GGUFFields) -> dict[str, Any]:
    """A tenth of mscale_all_dim is in the file, and mscale is the same in all models of the family.

    Without it, yarn's own magnitude applies.
    """
    numbers = {
        name: fields.number(f"rope.scaling.yarn_{name}")
        for name in ("beta_fast", "beta_slow", "log_multiplier")
    }
    tenth = numbers.pop("log_multiplier")
    found = {name: value for name, value in numbers.items() if value is not None}
    if tenth:
        mscale = round(10 * tenth, 6)  # stored as float32
        found |= {"mscale": mscale, "mscale_all_dim": mscale}
    return found
