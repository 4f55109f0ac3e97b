"""How files name a decoder's weights and in which order rows lie in them, and how our pages do.

Pages know Llama's names. A rule may also say that a tensor holds several of ours, lies transposed,
or has the rows of its heads in another order: what `weights.views.Arranged` undoes.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo_engine.models.recurrent_config import DeltaConfig, MambaConfig
from octavo_engine.models.speech_names import SpeechNames
from octavo_engine.weights.views import Arranged, StoredPlace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from octavo_engine.models.config import ModelConfig
    from octavo_engine.models.families import Naming
    from octavo_engine.weights.checkpoint import Checkpoint

Rules = tuple[tuple[str, str], ...]

_GPT2: Rules = (
    (r"^(?:transformer\.)?wte\.", "model.embed_tokens."),
    (r"^(?:transformer\.)?wpe\.", "model.embed_positions."),
    (r"^(?:transformer\.)?h\.", "model.layers."),
    (r"^(?:transformer\.)?ln_f\.", "model.norm."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
    (r"\.attn\.c_attn\.", ".self_attn.qkv_proj."),
    (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
    (r"\.mlp\.c_fc\.", ".mlp.up_proj."),
    (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
)
_QKV: Rules = ((r"\.(?:attention|self_attention)\.query_key_value\.", ".self_attn.qkv_proj."),)
_DENSE: Rules = (
    (r"\.(?:attention|self_attention)\.dense\.", ".self_attn.o_proj."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.up_proj."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
)
_FALCON: Rules = (
    (r"^transformer\.word_embeddings\.", "model.embed_tokens."),
    (r"^transformer\.h\.", "model.layers."),
    (r"^transformer\.ln_f\.", "model.norm."),
    *_QKV,
    *_DENSE,
)

_MAMBA: Rules = (
    (r"^(?:backbone|model)\.embeddings?\.", "model.embed_tokens."),
    (r"^backbone\.", "model."),
    (r"^model\.norm_f\.", "model.norm."),
    (r"^(model\.layers\.\d+)\.norm\.", r"\1.input_layernorm."),
    (r"\.mixer\.", ".mamba."),
)

# In this order, each at most once.
_RULES: Mapping[Naming, Rules] = MappingProxyType(
    {
        "llama": (),
        "gpt2": _GPT2,
        "bigcode": _GPT2,
        "gptj": (
            *_GPT2[:5],
            (r"\.attn\.([qkv])_proj\.", r".self_attn.\1_proj."),
            (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
            (r"\.mlp\.fc_in\.", ".mlp.up_proj."),
            (r"\.mlp\.fc_out\.", ".mlp.down_proj."),
        ),
        "neox": (
            (r"^gpt_neox\.embed_in\.", "model.embed_tokens."),
            (r"^gpt_neox\.layers\.", "model.layers."),
            (r"^gpt_neox\.final_layer_norm\.", "model.norm."),
            (r"^embed_out\.", "lm_head."),
            *_QKV,
            *_DENSE,
        ),
        "falcon": (
            *_FALCON,
            (r"\.ln_attn\.", ".input_layernorm."),
            (r"\.ln_mlp\.", ".post_attention_layernorm."),
        ),
        "bloom": (
            (r"^(?=word_embeddings|h\.|ln_f\.)", "transformer."),
            (r"^transformer\.word_embeddings_layernorm\.", "model.embedding_norm."),
            *_FALCON,
        ),
        "mpt": (
            *_GPT2[:4],
            (r"^transformer\.blocks\.", "model.layers."),
            (r"^transformer\.norm_f\.", "model.norm."),
            (r"\.norm_1\.", ".input_layernorm."),
            (r"\.norm_2\.", ".post_attention_layernorm."),
            (r"\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
            (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
            (r"\.ffn\.", ".mlp."),
        ),
        "lfm2": (
            (r"\.operator_norm\.", ".input_layernorm."),
            (r"\.ffn_norm\.", ".post_attention_layernorm."),
            (r"\.feed_forward\.(experts\.\d+\.)?w1\.", r".mlp.\1gate_proj."),
            (r"\.feed_forward\.(experts\.\d+\.)?w3\.", r".mlp.\1up_proj."),
            (r"\.feed_forward\.(experts\.\d+\.)?w2\.", r".mlp.\1down_proj."),
            (r"\.feed_forward\.gate\.", ".mlp.gate."),
            (r"\.feed_forward\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
            (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
            (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
            (r"^model\.embedding_norm\.", "model.norm."),
        ),
        "mamba2": _MAMBA,
        "falcon_mamba": _MAMBA,
        "nemotron_h": (
            (r"\.mixer\.([qkvo]_proj)\.", r".self_attn.\1."),
            (r"\.mixer\.((?:up|down)_proj)\.", r".mlp.\1."),
            *_MAMBA,
        ),
        "granite_hybrid": (
            (r"\.block_sparse_moe\.router\.layer\.", ".block_sparse_moe.gate."),
            (r"\.shared_mlp\.input_linear\.", ".mlp.gate_up_proj."),
            (r"\.shared_mlp\.output_linear\.", ".mlp.down_proj."),
        ),
        "bamba": (
            (r"\.feed_forward\.", ".mlp."),
            (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
            (r"^model\.final_layernorm\.", "model.norm."),
        ),
        "zamba2": (
            (r"\.mamba_decoder\.mamba\.", ".mamba."),
            (r"\.mamba_decoder\.input_layernorm\.", ".input_layernorm."),
            (r"^model\.final_layernorm\.", "model.norm."),
        ),
        "jamba": (
            (r"\.feed_forward\.router\.", ".mlp.gate."),
            (r"\.feed_forward\.", ".mlp."),
            (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
            (r"^model\.final_layernorm\.", "model.norm."),
        ),
        "vaultgemma": ((r"\.pre_feedforward_layernorm\.", ".post_attention_layernorm."),),
        "qwen3_next": (),
        "qwen3_5": (),
        "gemma3n": (),
        "starcoder2": (
            (r"\.mlp\.c_fc\.", ".mlp.up_proj."),
            (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
        ),
        "opt": (
            (r"^(?:model\.)?decoder\.", "model."),
            (r"^model\.final_layer_norm\.", "model.norm."),
            (r"\.self_attn_layer_norm\.", ".input_layernorm."),
            (r"\.final_layer_norm\.", ".post_attention_layernorm."),
            (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
            (r"\.fc1\.", ".mlp.up_proj."),
            (r"\.fc2\.", ".mlp.down_proj."),
        ),
        "phi": (
            (r"^model\.final_layernorm\.", "model.norm."),
            (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
            (r"\.mlp\.fc1\.", ".mlp.up_proj."),
            (r"\.mlp\.fc2\.", ".mlp.down_proj."),
        ),
        "stablelm": (
            (r"\.self_attn\.q_layernorm\.norms\.", ".self_attn.q_norm."),
            (r"\.self_attn\.k_layernorm\.norms\.", ".self_attn.k_norm."),
        ),
        "dbrx": (
            *_GPT2[:4],
            (r"^transformer\.blocks\.", "model.layers."),
            (r"^transformer\.norm_f\.", "model.norm."),
            (r"\.norm_attn_norm\.norm_1\.", ".input_layernorm."),
            (r"\.norm_attn_norm\.norm_2\.", ".post_attention_layernorm."),
            (r"\.norm_attn_norm\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
            (r"\.norm_attn_norm\.attn\.out_proj\.", ".self_attn.o_proj."),
            (r"\.ffn\.router\.layer\.", ".block_sparse_moe.gate."),
        ),
        "glm4": (
            (r"\.post_attention_layernorm\.", ".pre_feedforward_layernorm."),
            (r"\.post_self_attn_layernorm\.", ".post_attention_layernorm."),
            (r"\.post_mlp_layernorm\.", ".post_feedforward_layernorm."),
        ),
        "hyperclovax": (
            (r"\.post_attention_layernorm\.", ".pre_feedforward_layernorm."),
            (r"\.post_norm1\.", ".post_attention_layernorm."),
            (r"\.post_norm2\.", ".post_feedforward_layernorm."),
        ),
        "exaone": (
            *_GPT2[:6],
            (r"\.attn\.attention\.([qkv])_proj\.", r".self_attn.\1_proj."),
            (r"\.attn\.attention\.out_proj\.", ".self_attn.o_proj."),
            (r"\.mlp\.c_fc_0\.", ".mlp.gate_proj."),
            (r"\.mlp\.c_fc_1\.", ".mlp.up_proj."),
            (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
        ),
        "internlm2": (
            (r"^model\.tok_embeddings\.", "model.embed_tokens."),
            (r"^output\.", "lm_head."),
            (r"\.attention_norm\.", ".input_layernorm."),
            (r"\.ffn_norm\.", ".post_attention_layernorm."),
            (r"\.attention\.wqkv\.", ".self_attn.qkv_proj."),
            (r"\.attention\.wo\.", ".self_attn.o_proj."),
            (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
            (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
            (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
        ),
        "baichuan": ((r"\.self_attn\.W_pack\.", ".self_attn.qkv_proj."),),
        "hunyuan": (
            (r"\.self_attn\.query_layernorm\.", ".self_attn.q_norm."),
            (r"\.self_attn\.key_layernorm\.", ".self_attn.k_norm."),
        ),
        "llama4": (
            (r"\.feed_forward\.", ".mlp."),
            (r"\.mlp\.router\.", ".mlp.gate."),
            (r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),
        ),
        "gpt_oss": ((r"\.mlp\.router\.", ".mlp.gate."),),
        "granitemoe": ((r"\.block_sparse_moe\.router\.layer\.", ".block_sparse_moe.gate."),),
    }
)

_TRANSPOSED = frozenset(("gpt2",))  # projections are stored as [in, out]
# qkv_proj holds head after head: the queries that share a key, their key, their value.
_BY_HEAD = frozenset(("neox", "bloom", "falcon", "bigcode", "internlm2"))
_PROJECTION = re.compile(r"_proj\.weight$")
_HEADS = re.compile(r"\.self_attn\.(qkv_proj|q_proj|k_proj|q_norm|k_norm)\.(?:weight|bias)$")
_NORM_OF_HEAD = re.compile(r"(\.self_attn\.[qk]_norm)\.(\d+)\.weight$")
_EXPERTS = re.compile(
    r"^(model\.layers\.\d+)\.(?:block_sparse_moe|ffn\.experts\.mlp)\."
    r"(input_linear|output_linear|w1|v1|w2)(?:\.weight)?$"
)
# All experts' matrices as one, [experts, in, out]: of two halves, column by column in turns with
# gpt-oss, one behind the other with Llama 4.
_JOINED_EXPERTS = re.compile(
    r"^(model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias)?$"
)
_INTERLEAVED = re.compile(r"\.(q_proj|in_proj_qkvz|in_proj_ba)\.(?:weight|bias)$")
_BAICHUAN2_TOKENS = 125696  # its head's rows are brought to length one


def under_our_names(config: ModelConfig, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as the model's page asks for it."""
    family = config.family
    if family.naming == "whisper":
        return SpeechNames(checkpoint)
    if not _is_arranged(config):
        return checkpoint
    return Arranged(checkpoint, dict(_sources(config, checkpoint.names())))


class AdaptedLayer(NamedTuple):
    """A linear layer of our page that a layer of a checkpoint is, or is a part of."""

    name: str
    row_map: NDArray[np.int32] | None = None  # of each of its outputs the checkpoint's; None: same
    num_rows: int | None = None  # outputs of the checkpoint's layer; None: as many


def adapted_layers(config: ModelConfig, module: str) -> list[AdaptedLayer]:
    """Where an adapter of a layer goes that is called `module` in checkpoints of the family."""
    if not _is_arranged(config):
        return [AdaptedLayer(module)]
    return [
        AdaptedLayer(
            ours.removesuffix(".weight"),
            place.row_map,
            None if place.shape is None else place.shape[0],
        )
        for ours, place in _sources(config, [f"{module}.weight"])
    ]


def _is_arranged(config: ModelConfig) -> bool:
    """Whether the family's checkpoints have other names or places than our pages."""
    return config.family.naming != "llama" or config.family.turns_neighbours


def _sources(config: ModelConfig, names: Iterable[str]) -> Iterator[tuple[str, StoredPlace]]:
    naming = config.family.naming
    rules = [(re.compile(pattern), ours) for pattern, ours in _RULES[naming]]
    norms: dict[str, dict[int, str]] = {}
    for name in names:
        ours = name
        for pattern, replacement in rules:
            ours = pattern.sub(replacement, ours, count=1)
        if match := _EXPERTS.match(ours):
            yield from _experts(config, name, match)
        elif naming in ("gpt_oss", "llama4", "qwen3_5") and (match := _JOINED_EXPERTS.match(ours)):
            yield from _joined_experts(config, name, match)
        elif naming in ("qwen3_next", "qwen3_5") and (match := _INTERLEAVED.search(ours)):
            yield from _deinterleaved(config, name, ours, match[1])
        elif match := _NORM_OF_HEAD.search(ours):
            whole = ours[: match.start()] + f"{match[1]}.weight"
            norms.setdefault(whole, {})[int(match[2])] = name
        else:
            yield ours, _one(config, name, ours)
    for whole, by_head in norms.items():
        yield whole, StoredPlace(tuple(by_head[head] for head in sorted(by_head)))
    norms_of_ones: tuple[str, ...] = ()  # by no weight at all
    if config.block.qk_norm == "roped":
        norms_of_ones = ("self_attn.q_norm", "self_attn.k_norm")
    elif naming == "falcon_mamba":
        norms_of_ones = ("mamba.dt_layernorm", "mamba.b_layernorm", "mamba.c_layernorm")
    elif naming == "gemma3n":
        norms_of_ones = ("self_attn.v_norm",)
    for index in range(config.num_layers):
        if config.layers[index].reads is not None:
            continue
        for norm in norms_of_ones:
            yield f"model.layers.{index}.{norm}.weight", StoredPlace(())


def _deinterleaved(
    config: ModelConfig, name: str, ours: str, part: str
) -> Iterator[tuple[str, StoredPlace]]:
    """Rows that lie head by head, of what our pages have one behind the other."""
    if part == "q_proj":  # of each head its query, then its gate
        heads, dim = config.num_heads, config.head_dim
        rows = np.arange(2 * heads * dim, dtype=np.int32).reshape(heads, 2, dim)
        count = 2 * heads * dim
        shape = (count,) if ours.endswith(".bias") else (count, config.hidden_size)
        for place, own in enumerate(("q_proj", "g_proj")):
            row_map = np.ascontiguousarray(rows[:, place]).reshape(-1)
            yield ours.replace("q_proj", own), StoredPlace((name,), shape=shape, row_map=row_map)
        return
    delta = config.recurrent
    assert isinstance(delta, DeltaConfig), "the family has it"
    each = delta.num_value_heads // delta.num_key_heads
    sizes = [each, each]
    if part == "in_proj_qkvz":
        sizes = [delta.key_dim, delta.key_dim, each * delta.value_dim, each * delta.value_dim]
    whole = np.arange(delta.num_key_heads * sum(sizes), dtype=np.int32)
    parts = np.split(whole.reshape(delta.num_key_heads, -1), np.cumsum(sizes)[:-1], axis=1)
    row_map = np.concatenate([own.reshape(-1) for own in parts])
    yield ours, StoredPlace((name,), row_map=row_map)


def _one(config: ModelConfig, name: str, ours: str) -> StoredPlace:
    naming = config.family.naming
    if config.multipliers is not None and ours.endswith(".mamba.conv1d.weight"):
        return StoredPlace((name,), factors=_of_convolution(config))
    if naming == "baichuan" and ours == "lm_head.weight":
        return StoredPlace((name,), has_unit_rows=config.vocab_size == _BAICHUAN2_TOKENS)
    if ours == "model.embed_tokens_per_layer.weight":
        return _own_embeddings(config, name)
    is_transposed = naming in _TRANSPOSED and _PROJECTION.search(ours) is not None
    match = _HEADS.search(ours)
    shape = None
    if match is not None and match[1].endswith("norm") and config.block.qk_norm == "own":
        heads = config.num_heads if match[1] == "q_norm" else config.num_kv_heads
        shape = (heads, config.head_dim)
    rows = None if match is None else _rows(config, match[1])
    return StoredPlace((name,), shape=shape, row_map=rows, is_transposed=is_transposed)


def _own_embeddings(config: ModelConfig, name: str) -> StoredPlace:
    """Tokens that have none, as pictures' placeholders, have the first one's."""
    assert config.streams is not None, "the family has them"
    rows, columns = config.streams.layer_vocabulary, config.streams.layer_columns
    if rows >= config.vocab_size:
        return StoredPlace((name,))
    row_map = np.zeros(config.vocab_size, np.int32)
    row_map[:rows] = np.arange(rows, dtype=np.int32)
    shape = (rows, columns * config.num_layers)
    return StoredPlace((name,), shape=shape, row_map=row_map)


def _of_convolution(config: ModelConfig) -> NDArray[np.float32]:
    """The multipliers of x, B and C: a convolution of what they multiply is as well one by weights
    that they do."""
    mamba = config.recurrent
    assert isinstance(mamba, MambaConfig), "the family has it"
    assert config.multipliers is not None, "the family has them"
    each = mamba.num_groups * mamba.state_size
    sizes = (mamba.width, each, each)
    return np.repeat(np.array(config.multipliers.ssm[1:4], np.float32), sizes)


def _rows(config: ModelConfig, part: str) -> NDArray[np.int32] | None:
    """For each of our rows the one of the file, where they differ."""
    by_head, turns = config.family.naming in _BY_HEAD, config.family.turns_neighbours
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    if part != "qkv_proj":
        if not turns:
            return None
        count = heads if part.startswith("q") else kv_heads
        if part.endswith("norm") and config.block.qk_norm == "head":
            count = 1
        rows = np.arange(count * dim, dtype=np.int32).reshape(count, dim)
        return np.ascontiguousarray(rows[:, _turned_columns(config)]).reshape(-1)
    if not by_head:
        return None
    whole = np.arange((heads + 2 * kv_heads) * dim, dtype=np.int32)
    groups = whole.reshape(kv_heads, heads // kv_heads + 2, dim)
    q, k, v = groups[:, :-2], groups[:, -2], groups[:, -1]
    return np.concatenate([part.reshape(-1) for part in (q, k, v)])


def _turned_columns(config: ModelConfig) -> NDArray[np.int32]:
    """For each column of a head the file's: pairs of neighbours become pairs half a rope apart."""
    rope = next((layer.rope for layer in config.layers if layer.rope is not None), None)
    rotary = 0 if rope is None else rope.rotary_dim
    turned = np.arange(rotary, dtype=np.int32).reshape(-1, 2).T.reshape(-1)
    return np.concatenate([turned, np.arange(rotary, config.head_dim, dtype=np.int32)])


def _experts(
    config: ModelConfig, name: str, match: re.Match[str]
) -> Iterator[tuple[str, StoredPlace]]:
    """Each expert's matrices, of one that holds all of a layer's."""
    experts = config.experts
    assert experts is not None, "the family has them"
    count, width, hidden = experts.num_experts, experts.width, config.hidden_size
    kind = match[2]
    parts = {"input_linear": ("w1", "w3"), "output_linear": ("w2",),
             "w1": ("w1",), "v1": ("w3",), "w2": ("w2",)}[kind]  # fmt: skip
    shape: tuple[int, ...] = {
        "input_linear": (count, 2 * width, hidden),
        "output_linear": (count, hidden, width),
    }.get(kind, (count * width, hidden))
    for expert in range(count):
        for place, part in enumerate(parts):
            yield (
                f"{match[1]}.block_sparse_moe.experts.{expert}.{part}.weight",
                StoredPlace(
                    (name,),
                    shape=shape,
                    part=expert * len(parts) + place,
                    parts=count * len(parts),
                    is_transposed=kind == "w2",
                ),
            )


def _joined_experts(
    config: ModelConfig, name: str, match: re.Match[str]
) -> Iterator[tuple[str, StoredPlace]]:
    """Of numbers: those of gpt-oss in 4 bits have names of their own (weights/mxfp4.py)."""
    experts = config.experts
    assert experts is not None, "the family has them"
    count, width, hidden = experts.num_experts, experts.width, config.hidden_size
    place, kind, is_bias = match[1], match[2], match[3] is not None
    parts: tuple[tuple[str, NDArray[np.int32] | None], ...] = (("down_proj", None),)
    sizes: tuple[int, ...] = (width, hidden)
    if kind == "gate_up_proj":
        rows = np.arange(2 * width, dtype=np.int32)
        halves = (rows[0::2], rows[1::2])
        if config.family.naming != "gpt_oss":
            halves = (rows[:width], rows[width:])
        parts = (("gate_proj", halves[0]), ("up_proj", halves[1]))
        sizes = (hidden, 2 * width)
    is_transposed = config.family.naming != "qwen3_5" and not is_bias
    if not is_transposed:
        sizes = sizes[::-1]
    shape = (count, sizes[0]) if is_bias else (count, *sizes)
    for expert in range(count):
        for part, row_map in parts:
            yield (
                f"{place}.{expert}.{part}.{'bias' if is_bias else 'weight'}",
                StoredPlace(
                    (name,),
                    shape=shape,
                    row_map=row_map,
                    part=expert,
                    parts=count,
                    is_transposed=is_transposed,
                ),
            )
