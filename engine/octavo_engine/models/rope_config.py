"""Reading ropes from config.json, in today's spelling (`rope_parameters`) and in the older ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.models.rope import RopeConfig

if TYPE_CHECKING:
    from octavo_engine.models.families import Family
    from octavo_engine.models.fields import ConfigFields
    from octavo_engine.models.rope import RopeKind

DEFAULT_THETA = 10000.0
MAX_POSITIONS = 1 << 28
MAX_THETA = 1e12
MAX_FACTOR = 1e6
_KINDS: dict[str, RopeKind] = {
    "default": "default",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
}


class RopeConfigs(NamedTuple):
    """The rope of layers that see everything, and that of layers that see a window."""

    full: RopeConfig
    local: RopeConfig


def read_ropes(
    fields: ConfigFields, family: Family, *, head_dim: int, max_positions: int
) -> RopeConfigs:
    """Both ropes; they are the same one unless the family or the file distinguishes them."""

    def read(section: ConfigFields | None, theta_name: str) -> RopeConfig:
        rope = _read_rope(
            fields, section, family, theta_name=theta_name, head_dim=head_dim, limit=max_positions
        )
        if family.axes == "none" or section is None:
            return rope
        sections = _sections(section, rope.rotary_dim // 2)
        if family.axes == "in turn" and sections is not None:
            _check_turns(section, sections)
            return replace(rope, sections=sections, is_interleaved=True)
        return replace(rope, sections=sections)

    given = fields.section("rope_parameters")
    if given is not None and given.section("full_attention") is not None:
        full = read(given.section("full_attention"), "rope_theta")
        local_name = "rope_local_base_freq" if family.local_rope else "rope_theta"
        return RopeConfigs(full, read(given.section("sliding_attention"), local_name))
    full = read(fields.section("rope_scaling") or given, "rope_theta")
    if family.local_rope:
        return RopeConfigs(
            full, read(None, "rope_local_base_freq")
        )  # scaling is of the full one only
    return RopeConfigs(full, full)


def _read_rope(
    fields: ConfigFields,
    section: ConfigFields | None,
    family: Family,
    *,
    theta_name: str,
    head_dim: int,
    limit: int,
) -> RopeConfig:
    def number(name: str, default: float) -> float:
        value = section.optional_positive(name) if section is not None else None
        return default if value is None else value

    theta = number("rope_theta", fields.optional_positive(theta_name) or DEFAULT_THETA)
    share = number(
        "partial_rotary_factor", fields.optional_positive("partial_rotary_factor") or 1.0
    )
    rotary_dim = fields.optional_integer("rotary_dim", maximum=head_dim) or int(head_dim * share)
    if share > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise fields.error(
            "partial_rotary_factor",
            f"must leave an even number of columns of a head of {head_dim}, at least 2 "
            f"({share:g} leaves {rotary_dim})",
        )
    if not 1 < theta <= MAX_THETA:
        raise (section or fields).error("rope_theta", f"must be above 1 and at most {MAX_THETA:g}")
    kind = _kind(section, family)
    alpha = section.optional_positive("alpha") if section is not None else None
    if alpha is not None and kind == "dynamic" and rotary_dim > 2:
        # Hunyuan's: a larger base, whatever the length.
        stretched = theta * alpha ** (rotary_dim / (rotary_dim - 2))
        return RopeConfig(theta=stretched, rotary_dim=rotary_dim, max_positions=limit)
    if section is None or kind == "default":
        return RopeConfig(theta=theta, rotary_dim=rotary_dim, max_positions=limit)
    original = (
        fields.optional_integer("original_max_position_embeddings", maximum=MAX_POSITIONS)
        or section.optional_integer("original_max_position_embeddings", maximum=MAX_POSITIONS)
        or limit
    )
    factor = section.optional_positive("factor")
    if factor is None and kind in ("longrope", "yarn"):
        factor = limit / original
    config = RopeConfig(
        kind=kind,
        theta=theta,
        rotary_dim=rotary_dim,
        max_positions=limit,
        factor=section.positive("factor") if factor is None else factor,
        original_max_positions=original,
        attention_factor=section.optional_positive("attention_factor"),
        low_freq_factor=number("low_freq_factor", 1.0),
        high_freq_factor=number("high_freq_factor", 4.0),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        mscale=section.optional_positive("mscale"),
        mscale_all_dim=section.optional_positive("mscale_all_dim"),
        truncate=section.boolean("truncate") if section.raw("truncate") is not None else True,
        short_factor=_longrope_factors(section, kind, "short_factor", rotary_dim),
        long_factor=_longrope_factors(section, kind, "long_factor", rotary_dim),
    )
    _check(config, section)
    return config


def _kind(section: ConfigFields | None, family: Family) -> RopeKind:
    if section is None:
        return "default"
    key = "type" if section.raw("rope_type") is None else "rope_type"  # the old name and the new
    name = section.optional_text(key) or "default"
    if name == "mrope" and family.axes != "none":
        return "default"
    if name not in _KINDS:
        raise section.error(key, f"must be one of {', '.join(sorted(_KINDS))}")
    if name == "yarn" and family.yarn_is_longrope:
        return "longrope"
    return _KINDS[name]


def _sections(section: ConfigFields, num_pairs: int) -> tuple[int, int, int] | None:
    value = section.raw("mrope_section")
    if value is None:
        return None
    is_list = isinstance(value, list) and len(value) == 3
    if is_list and all(type(v) is int and v >= 0 for v in value) and sum(value) == num_pairs:
        time, line, column = value
        return time, line, column
    raise section.error("mrope_section", f"must be three numbers that add up to {num_pairs}")


def _check_turns(section: ConfigFields, sections: tuple[int, int, int]) -> None:
    """Every third pair is of a line, the next one of a column."""
    for axis in (1, 2):
        if 3 * (sections[axis] - 1) + axis >= sum(sections):
            raise section.error("mrope_section", "must have at most a third of the pairs for each")


def _longrope_factors(
    section: ConfigFields, kind: RopeKind, name: str, rotary_dim: int
) -> tuple[float, ...]:
    return section.positives(name, rotary_dim // 2) if kind == "longrope" else ()


def _check(config: RopeConfig, section: ConfigFields) -> None:
    """What would divide by zero or take the logarithm of nothing."""
    if config.kind == "llama3" and config.high_freq_factor < config.low_freq_factor:
        raise section.error("high_freq_factor", "must not be below low_freq_factor")
    if config.kind == "dynamic" and (config.rotary_dim <= 2 or config.factor < 1):
        raise section.error("factor", "must be at least 1, and heads wider than 2, for dynamic")
    if config.kind in ("yarn", "longrope") and config.original_max_positions < 2:
        raise section.error("original_max_position_embeddings", "must be at least 2")
    if config.factor > MAX_FACTOR:
        raise section.error("factor", f"must be at most {MAX_FACTOR:g}")
