"""Instructions of layers with recurrent states, and of residuals in streams, as csrc takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, assert_never

import numpy as np

from octavo_engine.backends.native import graph as g

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from octavo_engine import _native

StateNode: TypeAlias = g.ShortConv | g.SsdScan | g.SelectiveScan | g.DeltaRule
RecurrentNode: TypeAlias = (
    g.Columns
    | g.Join
    | g.Multiply
    | g.GroupNorm
    | g.Mix
    | g.MatchRms
    | g.Sparsify
    | g.ScaleColumns
    | StateNode
)


def emit_recurrent(
    program: _native.Program,
    instruction: RecurrentNode,
    buffers: Mapping[g.Value, int],
    ordinals: Sequence[int],
) -> None:
    """`ordinals`: the number of each layer among those with a state."""
    out = buffers[instruction.out]
    match instruction:
        case g.Columns(x=x, first=first):
            program.columns(out, buffers[x], first)
        case g.Join(x=x, y=y):
            program.join(out, buffers[x], buffers[y])
        case g.Multiply(x=x, y=y, activation=activation):
            program.multiply(out, buffers[x], buffers[y], activation or "")
        case g.GroupNorm(x=x, weight=weight, eps=eps, size=size):
            program.group_norm(out, buffers[x], weight, eps, size)
        case g.Mix(x=x, weights=weights, num_inputs=num_inputs, offset=offset):
            program.mix(out, buffers[x], buffers[weights], num_inputs, offset)
        case g.MatchRms(x=x, like=like, floor=floor):
            program.match_rms(out, buffers[x], buffers[like], floor)
        case g.Sparsify(x=x, deviations=deviations):
            program.sparsify(out, buffers[x], deviations)
        case g.ScaleColumns(x=x, factors=factors):
            program.scale_columns(out, buffers[x], factors)
        case _:
            _emit_scan(program, instruction, buffers, ordinals)


def _emit_scan(
    program: _native.Program,
    instruction: StateNode,
    buffers: Mapping[g.Value, int],
    ordinals: Sequence[int],
) -> None:
    out = buffers[instruction.out]
    match instruction:
        case g.ShortConv(x=x, spec=conv):
            program.short_conv(
                out,
                buffers[x],
                ordinals[conv.layer],
                conv.kernel,
                np.ascontiguousarray(conv.weight[:, 0].T).reshape(-1),
                conv.bias,
                conv.activation or "",
            )
        case g.SsdScan(xbc=xbc, dt=dt, spec=ssd):
            program.ssd_scan(
                out,
                buffers[xbc],
                buffers[dt],
                ordinals[ssd.layer],
                ssd.offset,
                (ssd.num_heads, ssd.head_dim, ssd.num_groups, ssd.state_size),
                _decay(ssd.a_log),
                ssd.d,
                ssd.dt_bias,
                ssd.dt_min,
                ssd.dt_max,
            )
        case g.SelectiveScan(x=x, dt=dt, b=b, c=c, spec=selective):
            program.selective_scan(
                out,
                (buffers[x], buffers[dt], buffers[b], buffers[c]),
                ordinals[selective.layer],
                selective.offset,
                selective.state_size,
                np.ascontiguousarray(_decay(selective.a_log).T).reshape(-1),
                selective.d,
                selective.dt_bias,
            )
        case g.DeltaRule(qkv=qkv, gates=gates, spec=rule):
            program.delta_rule(
                out,
                buffers[qkv],
                buffers[gates],
                ordinals[rule.layer],
                rule.offset,
                (rule.num_key_heads, rule.num_value_heads, rule.key_dim, rule.value_dim),
                _decay(rule.a_log),
                rule.dt_bias,
            )
        case _:
            assert_never(instruction)


def _decay(a_log: NDArray[np.float32]) -> NDArray[np.float32]:
    return (-np.exp(a_log)).astype(np.float32)
