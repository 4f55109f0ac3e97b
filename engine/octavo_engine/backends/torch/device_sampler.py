"""Sampling where the logits are: plain rows by the draw alone, rare parameters in torch before it.

The order of work is that of csrc/cpu/sampling.h, and every float operation is a launch of its own,
so nothing is fused and the numbers are the CPU's. A token that the host does not know yet is where
the step before it keeps it; what the host sends goes through pinned memory, so that it
waits for nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from octavo_engine.backends.torch.landing import LandedScores
from octavo_engine.backends.torch.plain_draw import masses, sort_keys
from octavo_engine.backends.torch.token_counts import OUTPUT
from octavo_engine.backends.torch.transfers import send
from octavo_engine.sampling.batch import SAMPLED_NOT_FINITE, SAMPLED_OK
from octavo_engine.sampling.processors import apply_processors
from octavo_engine.sampling.rows import has_penalty

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from octavo_engine.backends.torch.device_step import DrawParams
    from octavo_engine.backends.torch.token_counts import TokenCounts
    from octavo_engine.sampling.batch import PendingMasks, Ragged, SamplingBatch

    Draw = Callable[[Tensor, DrawParams], Tensor]

LARGEST = float(np.finfo(np.float32).max)


class Raw(NamedTuple):
    """What log-probabilities need of the logits before anything was done to them."""

    logits: Tensor
    maxima: Tensor  # [S, 1]
    log_totals: Tensor  # [S, 1] float64


def is_plain(sampling: SamplingBatch) -> bool:
    """Whether the draw is all there is to do."""
    return (
        sampling.num_logprobs < 0
        and sampling.bias is None
        and sampling.allowed is None
        and sampling.masks is None
        and not sampling.processed
        and not _penalised(sampling).any()
    )


def sample(
    logits: Tensor, sampling: SamplingBatch, params: DrawParams, draw: Draw, counts: TokenCounts
) -> tuple[Tensor, LandedScores | None]:
    """Everything that a batch may ask for: tokens and statuses [2, S], and log-probabilities if
    any are wanted. `logits` [S, vocabulary] float32 may be changed. `counts` are of the runner's
    rows."""
    _process(logits, sampling)
    is_flawed = ~(logits <= LARGEST).all(-1)
    wants_logprobs = sampling.num_logprobs >= 0
    raw = _raw(logits, is_flawed) if wants_logprobs else None
    # What is scored is scored as it is; adjustments are only for rows that sample.
    adjusted = logits.clone() if wants_logprobs else logits
    _allow(adjusted, sampling.allowed)
    _mask(adjusted, sampling.masks)
    _add_bias(adjusted, sampling.bias)
    _penalise(adjusted, sampling, params, counts)
    found = draw(adjusted, params)
    found[1] = found[1].masked_fill(is_flawed, SAMPLED_NOT_FINITE)
    found[0] = found[0].masked_fill(is_flawed, -1)
    return found, None if raw is None else _score(raw, found, sampling)


def _process(logits: Tensor, sampling: SamplingBatch) -> None:
    """Custom processors run on the host; only their rows travel."""
    if not sampling.processed:
        return
    rows = sorted({row.logits_row for row in sampling.processed})
    places = {row: place for place, row in enumerate(rows)}
    host = logits[rows].cpu().numpy()
    apply_processors(
        [row._replace(logits_row=places[row.logits_row]) for row in sampling.processed], host
    )
    logits[rows] = torch.from_numpy(host).to(logits.device)


def _raw(logits: Tensor, is_flawed: Tensor) -> Raw:
    kept = logits.where(~is_flawed[:, None], 0.0)
    maxima = kept.amax(-1, keepdim=True)
    safe = maxima.where(maxima > -torch.inf, 0.0)
    total = masses(kept, safe, 1.0).sum(-1, keepdim=True)
    return Raw(kept, safe, torch.log(total.double() * 2.0**-42))


def _score(raw: Raw, found: Tensor, sampling: SamplingBatch) -> LandedScores:
    wanted = sampling.num_logprobs
    is_ok = found[1] == SAMPLED_OK
    tokens = found[0].long().clamp(min=0)[:, None]
    chosen = raw.logits.gather(-1, tokens)
    logprobs = _logprobs(chosen, raw)[:, 0].where(is_ok, torch.nan)
    ranks = ((raw.logits > chosen).sum(-1) + 1).where(is_ok, 0)
    count = min(wanted, raw.logits.shape[-1])
    # Keys, not logits: of equal ones the lowest id comes first.
    ids = _widened(sort_keys(raw.logits).topk(count, dim=-1).indices, wanted)
    if sampling.logprob_ids is not None:
        ids = _chosen(ids, sampling.logprob_ids)
    values = _logprobs(raw.logits.gather(-1, ids.clamp(min=0)), raw)
    is_there = is_ok[:, None] & (ids >= 0)
    ids = ids.where(is_there, -1)
    return LandedScores(logprobs, ranks, ids, values.where(is_there, -torch.inf))


def _logprobs(logits: Tensor, raw: Raw) -> Tensor:
    return ((logits - raw.maxima).double() - raw.log_totals).float()


def _widened(ids: Tensor, columns: int) -> Tensor:
    """A vocabulary may have fewer tokens than alternatives were requested."""
    return functional.pad(ids, (0, columns - ids.shape[1]), value=-1)


def _chosen(ids: Tensor, chosen: Ragged) -> Tensor:
    """With the tokens that rows ask for, in their order, in place of the likeliest."""
    lengths = np.diff(chosen.starts)
    wanted = np.full(ids.shape, -1, np.int64)
    wanted[np.arange(ids.shape[1]) < lengths[:, None]] = chosen.ids
    has_list = send(lengths > 0, ids.device)
    return torch.where(has_list[:, None], send(wanted, ids.device), ids)


def _entries(lists: Ragged, vocab: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Each entry's place in the flat logits, and which of them are in the vocabulary."""
    rows = np.repeat(np.arange(len(lists.starts) - 1), np.diff(lists.starts))
    ids = lists.ids[: lists.starts[-1]]
    is_known = (ids >= 0) & (ids < vocab)
    return rows * vocab + ids, is_known


def _allow(x: Tensor, allowed: Ragged | None) -> None:
    if allowed is None:
        return
    places, is_known = _entries(allowed, x.shape[1])
    has_list = send(np.diff(allowed.starts) > 0, x.device)
    mask = ~has_list[:, None].expand_as(x)
    mask = mask.contiguous()
    mask.view(-1)[send(places[is_known], x.device)] = True
    x.masked_fill_(~mask, -torch.inf)


def _mask(x: Tensor, masks: PendingMasks | None) -> None:
    """Bits travel packed; they are spread out on the device."""
    if masks is None:
        return
    rows, bits = masks.take()
    owners = np.flatnonzero(rows >= 0)
    if not len(owners):
        return
    packed = send(bits[rows[owners]].view(np.uint8), x.device)
    places = torch.arange(8, dtype=torch.uint8, device=x.device)
    allowed = ((packed[:, :, None] >> places) & 1).flatten(1).bool()
    width = min(allowed.shape[1], x.shape[1])
    banned = torch.ones((len(owners), x.shape[1]), dtype=torch.bool, device=x.device)
    banned[:, :width] = ~allowed[:, :width]
    at = send(owners, x.device)
    x[at] = x[at].masked_fill(banned, -torch.inf)


def _add_bias(x: Tensor, bias: Ragged | None) -> None:
    if bias is None or bias.values is None:
        return
    places, is_known = _entries(bias, x.shape[1])
    places, values = places[is_known], bias.values[: len(is_known)][is_known]
    flat = x.view(-1)
    # Entries for the same token come one after the other, as the list has them; mostly there are
    # none, and one round does it.
    while len(places):
        _, firsts = np.unique(places, return_index=True)
        at = send(places[firsts], x.device)
        before = flat[at]
        flat[at] = _bounded(before, before + send(values[firsts], x.device))
        rest = np.ones(len(places), bool)
        rest[firsts] = False
        places, values = places[rest], values[rest]


def _penalised(sampling: SamplingBatch) -> NDArray[np.bool_]:
    return has_penalty(sampling.table[sampling.rows]) & (sampling.targets < 0)


def _penalise(x: Tensor, sampling: SamplingBatch, params: DrawParams, counts: TokenCounts) -> None:
    """Only the rows that have penalties."""
    rows = np.flatnonzero(_penalised(sampling))
    if not len(rows):
        return
    device = x.device
    entries = sampling.table[sampling.rows[rows]]
    words = counts.row_counts(rows, sampling, params)
    num_outputs = words // OUTPUT

    def column(name: str) -> Tensor:
        return send(entries[name], device)[:, None]

    where = send(rows, device)
    before = x[where]
    repetition = column("repetition_penalty")
    y = torch.where(before > 0, before / repetition, before * repetition)
    y = torch.where(repetition == 1, before, y)
    counted = y - column("frequency_penalty") * num_outputs.float()
    y = torch.where(num_outputs > 0, counted - column("presence_penalty"), y)
    x[where] = torch.where(words > 0, _bounded(before, y), before)


def _bounded(before: Tensor, after: Tensor) -> Tensor:
    """What is banned stays banned; nothing grows to infinity."""
    return torch.where(before == -torch.inf, before, after.clamp(max=LARGEST))
