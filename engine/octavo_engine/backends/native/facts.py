"""What is known of a program's instructions before they run: names, bytes, operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from octavo_engine.backends.native import graph as g

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray


class OpFacts(NamedTuple):
    """Of one instruction."""

    name: str  # what it does, to what: linear 576→960 q4_1
    rows: str  # T: of all tokens; S: of those whose logits are wanted
    weight_bytes: int = 0  # read once a step, whatever the rows
    flops_per_row: int = 0  # of products with weights; of attention unknown: the contexts differ
    flops_per_pair: int = 0  # of attention: of a row and one that it sees
    is_segmented: bool = False  # it sees a window of the step only


def facts_of(instructions: Sequence[g.Instruction]) -> list[OpFacts]:
    """In their order."""
    return [_facts(instruction) for instruction in instructions]


def described(facts: OpFacts, num_rows: int, seconds: float) -> dict[str, Any]:
    """As a profile shows it, with the speeds that the time makes of it."""
    shown: dict[str, Any] = {"rows": num_rows}
    if facts.weight_bytes:
        shown["weight_bytes"] = facts.weight_bytes
        shown["GB/s"] = round(facts.weight_bytes / seconds / 1e9, 2) if seconds else None
    if facts.flops_per_row:
        flops = facts.flops_per_row * num_rows
        shown["flops"] = flops
        shown["GFLOP/s"] = round(flops / seconds / 1e9, 1) if seconds else None
    return shown


def timed(
    facts: Sequence[OpFacts], times: NDArray[np.int64], num_tokens: int, num_logit_rows: int
) -> Iterator[tuple[str, int, int, dict[str, Any]]]:
    """Name, begin, end and what is known of each instruction that ran; times in ns."""
    begin = int(times[0])
    for each, end in zip(facts, times[1:].tolist(), strict=True):
        if end == 0:  # it had no rows
            continue
        rows = num_tokens if each.rows == "T" else num_logit_rows
        yield each.name, begin, end, described(each, rows, (end - begin) / 1e9)
        begin = end


def _facts(instruction: g.Instruction) -> OpFacts:
    rows = instruction.out.rows
    match instruction:
        case g.Linear(linear=linear):
            weight = linear.weight
            name = f"linear {weight.cols}→{weight.rows} {weight.dtype}"
            for what in (instruction.glu and "glu", instruction.activation,
                         instruction.onto and "add"):  # fmt: skip
                name += f" + {what}" if what else ""
            return OpFacts(name, rows, weight.nbytes, 2 * weight.rows * weight.cols)
        case g.AttentionNode(spec=spec):
            layer = "" if instruction.is_whole else f", layer {spec.layer}"
            return OpFacts(
                f"attention {spec.num_heads}/{spec.num_kv_heads} heads{layer}",
                rows,
                flops_per_pair=4 * spec.num_heads * spec.head_dim,
                is_segmented=spec.is_segmented,
            )
        case g.LatentAttentionNode(spec=latent):
            ups = (*instruction.key_up.weights, *instruction.value_up.weights)
            name = f"latent attention {latent.num_heads} heads, layer {latent.layer}"
            flops = 2 * sum(weight.rows * weight.cols for weight in ups)
            return OpFacts(name, rows, sum(weight.nbytes for weight in ups), flops)
        case g.Moe(spec=moe):
            gate_up, down = instruction.gate_up.weights, instruction.down.weights
            sizes = [weight.rows * weight.cols for weight in (gate_up[0], down[0])]
            name = f"experts {moe.top_k} of {instruction.down.total}"
            return OpFacts(name, rows, 0, 2 * moe.top_k * sum(sizes))  # which are read, varies
        case g.RmsNorm() | g.LayerNorm():
            kind = "rms_norm" if isinstance(instruction, g.RmsNorm) else "layer_norm"
            return OpFacts(kind + (" + add" if instruction.add is not None else ""), rows)
        case _:
            return OpFacts(_NAMES[type(instruction)], rows)


_NAMES = {
    g.Embed: "embedding", g.InputRows: "input",
    g.Glu: "glu", g.Activate: "activation", g.Add: "add", g.Scale: "scale",
    g.GateNode: "gate", g.SoftCap: "soft_cap", g.Clamp: "clamp", g.Convert: "convert",
    g.SelectRows: "select_rows",
    g.PoolRows: "pool", g.FeaturesNode: "features", g.ShiftRows: "shift_rows",
    g.StoreCross: "store_cross", g.CrossAttentionNode: "cross_attention",
    g.PoolRows: "pool", g.Columns: "columns", g.Join: "join", g.Multiply: "multiply",
    g.GroupNorm: "group_norm", g.ShortConv: "short_conv", g.SsdScan: "ssd_scan",
    g.DeltaRule: "delta_rule", g.Mix: "mix", g.MatchRms: "match_rms", g.Sparsify: "sparsify",
    g.ScaleColumns: "scale_columns",
    g.SelectiveScan: "selective_scan",
}  # fmt: skip
