"""From a planned graph to a Program that csrc runs: one call for each instruction."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from octavo_engine import _native
from octavo_engine.backends.native import graph as g
from octavo_engine.backends.native.facts import OpFacts, facts_of
from octavo_engine.backends.native.plan import plan_memory
from octavo_engine.backends.native.recurrent import emit_recurrent
from octavo_engine.backends.native.rope_table import RopeTables
from octavo_engine.backends.native.shard import Shard, cut_heads

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo_engine.backends.backend import BackendLimits


class CachePlaces(NamedTuple):
    """Of each layer: whose block tables it reads, and its number in the KV cache, or among those
    with a recurrent state."""

    groups: Sequence[int] = (0,)
    ordinals: Sequence[int] = (0,)


class CompiledProgram(NamedTuple):
    """A program, the number of the buffer that holds the logits, what each instruction is, and the
    buffers of what is kept."""

    program: _native.Program
    logits: int
    ops: list[OpFacts]
    kept: Mapping[str, int]
    arena_bytes: int


def compile_graph(
    graph: g.Graph,
    team: _native.Team,
    limits: BackendLimits,
    places: CachePlaces,
    activation_bits: int = 16,
    ranks: _native.Ranks | None = None,
    peers: _native.Ranks | None = None,
    *,
    joins_phases: bool = True,
) -> CompiledProgram:
    """Plan the arena for the largest step and add all instructions. The arena is all ranks': it has
    whole values, of which each rank writes the columns and heads that it has weights for."""
    shard = Shard() if ranks is None else Shard(ranks.rank, ranks.size)
    plan = plan_memory(graph, {"T": limits.max_tokens, "S": limits.max_logit_rows})
    program = _native.Program(
        team,
        plan.num_bytes,
        limits.max_tokens,
        limits.max_logit_rows,
        activation_bits,
        ranks,
        peers,
        joins_phases,
    )
    buffers = {
        value: program.buffer(offset, value.cols, value.dtype, value.rows)
        for value, offset in plan.offsets.items()
    }
    tables = RopeTables(limits.max_model_len)
    for instruction in graph.instructions:
        _emit(program, instruction, buffers, tables, places, shard)
    kept = {name: buffers[value] for name, value in graph.kept}
    facts = facts_of(graph.instructions)
    return CompiledProgram(program, buffers[graph.result], facts, kept, plan.num_bytes)


def _emit(
    program: _native.Program,
    instruction: g.Instruction,
    buffers: Mapping[g.Value, int],
    tables: RopeTables,
    places: CachePlaces,
    shard: Shard,
) -> None:
    out = buffers[instruction.out]
    match instruction:
        case g.Embed(table=table, scale=scale, of=of, offset=offset):
            program.embed(out, table, scale, of, offset)
        case g.InputRows(first=first, is_sparse=is_sparse):
            program.input(out, first, is_sparse)
        case g.Linear():
            _emit_linear(program, instruction, buffers)
        case g.RmsNorm(x=x, weight=weight, eps=eps, add=add, add_scale=add_scale):
            added = -1 if add is None else buffers[add]
            program.rms_norm(out, buffers[x], weight, eps, added, add_scale)
        case g.LayerNorm(x=x, weight=weight, bias=bias, eps=eps, add=add, add_scale=add_scale):
            added = -1 if add is None else buffers[add]
            program.layer_norm(out, buffers[x], weight, bias, eps, added, add_scale)
        case g.AttentionNode():
            _emit_attention(
                program, out, buffers[instruction.qkv], instruction, tables, places, shard
            )
        case g.LatentAttentionNode():
            _emit_latents(program, instruction, buffers, tables, places, shard)
        case g.Moe():
            _emit_moe(program, instruction, buffers)
        case g.Glu(x=x, activation=activation):
            program.glu(out, buffers[x], activation)
        case g.Activate(x=x, activation=activation):
            program.activation(out, buffers[x], activation)
        case g.Add(x=x, y=y, scale=scale):
            program.add(out, buffers[x], buffers[y], scale)
        case g.Scale(x=x, factor=factor):
            program.scale(out, buffers[x], factor)
        case g.GateNode(x=x, scores=scores):
            program.gate(out, buffers[x], buffers[scores])
        case g.SoftCap(x=x, cap=cap):
            program.soft_cap(out, buffers[x], cap)
        case g.Clamp(x=x, limit=limit):
            program.clamp(out, buffers[x], limit)
        case g.Convert(x=x):
            program.convert(out, buffers[x])
        case g.SelectRows(x=x):
            program.select_rows(out, buffers[x])
        case g.PoolRows(x=x, how=how):
            program.pool(out, buffers[x], how)
        case g.FeaturesNode():
            program.features(out)
        case g.ShiftRows(x=x):
            program.shift_rows(out, buffers[x])
        case g.StoreCross(x=x, spec=cross):
            program.store_cross(
                buffers[x], cross.layer, cross.num_heads, cross.head_dim, cross.length
            )
        case g.CrossAttentionNode(q=q, spec=cross):
            program.cross_attention(
                out,
                buffers[q],
                cross.layer,
                cross.num_heads,
                cross.head_dim,
                cross.length,
                cross.scale,
            )
        case _:
            emit_recurrent(program, instruction, buffers, places.ordinals)


def _emit_linear(
    program: _native.Program, instruction: g.Linear, buffers: Mapping[g.Value, int]
) -> None:
    mode, activation = "store", instruction.activation or ""
    if instruction.glu is not None:
        mode, activation = "glu", instruction.glu
    elif instruction.onto is not None:
        mode = "add"
    slots, site = instruction.linear.adapters or (None, 0)
    program.linear(
        buffers[instruction.out],
        buffers[instruction.x],
        instruction.linear.weight,
        instruction.linear.bias,
        mode,
        activation,
        instruction.scale,
        slots,
        site,
        -1 if instruction.u is None else buffers[instruction.u],
    )


def _emit_moe(program: _native.Program, moe: g.Moe, buffers: Mapping[g.Value, int]) -> None:
    program.moe(
        buffers[moe.out],
        buffers[moe.x],
        buffers[moe.scores],
        buffers[moe.gathered],
        buffers[moe.hidden],
        buffers[moe.results],
        moe.gate_up.weights,
        moe.down.weights,
        moe.spec.top_k,
        moe.spec.renormalise,
        moe.spec.activation,
        moe.spec.is_sigmoid,
        moe.spec.num_groups,
        moe.spec.top_groups,
        moe.spec.best_of_group,
        moe.spec.scale,
        moe.spec.bias,
        moe.gate_up.bias,
        moe.down.bias,
        moe.spec.weighs_inputs,
        moe.gate_up.first,
        moe.gate_up.slots,
        moe.gate_up.total,
    )


def _emit_latents(
    program: _native.Program,
    node: g.LatentAttentionNode,
    buffers: Mapping[g.Value, int],
    tables: RopeTables,
    places: CachePlaces,
    shard: Shard,
) -> None:
    spec = node.spec
    program.latent_attention(
        buffers[node.out],
        buffers[node.q],
        buffers[node.kv],
        buffers[node.nope],
        buffers[node.mixed],
        node.key_up.weights,
        node.value_up.weights,
        layer=places.ordinals[spec.layer],
        num_heads=spec.num_heads,
        first_head=cut_heads(spec.num_heads, 1, shard).first_head,
        rank=spec.rank,
        scale=spec.scale,
        cos_sin=tables.get(spec.rope),
        turns_neighbours=spec.turns_neighbours,
        kv_norm=spec.kv_norm,
        norm_eps=spec.norm_eps,
        window=spec.window or 0,
        group=places.groups[spec.layer],
    )


def _emit_attention(
    program: _native.Program,
    out: int,
    qkv: int,
    attention: g.AttentionNode,
    tables: RopeTables,
    places: CachePlaces,
    shard: Shard,
) -> None:
    spec = attention.spec
    layer = 0 if attention.is_whole else spec.layer  # what is not kept can share its place
    program.attention(
        out,
        qkv,
        layer=places.ordinals[layer],
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.scale,
        rotary_dim=0 if spec.rope is None else 2 * len(spec.rope.inv_freq),
        cos_sin=None if spec.rope is None else tables.get(spec.rope),
        window=spec.window or 0,
        soft_cap=spec.soft_cap or 0.0,
        q_norm=spec.q_norm,
        k_norm=spec.k_norm,
        norm_eps=spec.norm_eps,
        norm=spec.norm,
        norm_after_rope=spec.norm_after_rope,
        alibi=spec.alibi,
        is_causal=spec.is_causal,
        is_whole=attention.is_whole,
        group=places.groups[layer],
        own_heads=cut_heads(spec.num_heads, spec.num_kv_heads, shard),
        sinks=spec.sinks,
        rope_sections=None if spec.rope is None else spec.rope.sections,
        is_chunked=spec.is_chunked,
        is_segmented=spec.is_segmented,
        rope_interleaved=spec.rope is not None and spec.rope.is_interleaved,
        query_scales=None if spec.temperature is None else tables.scales(spec.temperature),
    )
