"""The draw in plain torch, by sorting whole rows: slow, on any device, and the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from octavo_engine.sampling.batch import SAMPLED_NOT_FINITE, SAMPLED_NOTHING_ALLOWED

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.torch.device_step import DrawParams

MASS_BITS = 42
_LOW = 0xFFFFFFFF
_COEFFICIENTS = (
    1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
)  # fmt: skip


def draw(logits: Tensor, params: DrawParams) -> Tensor:
    """Tokens and statuses, [2, S] int32, and the tokens kept; the rules are those of
    csrc/cpu/sampling.h."""
    is_flawed = ~(logits <= torch.finfo(torch.float32).max).all(-1)
    x = logits.where(~is_flawed[:, None], 0.0)
    maximum = x.amax(-1, keepdim=True)
    is_banned = maximum[:, 0] == -torch.inf
    x = x.where(~is_banned[:, None], 0.0)
    maximum = maximum.where(~is_banned[:, None], 0.0)
    tokens = first_argmax(x, maximum)
    scale = params.inverse_temperatures[:, None]
    is_drawn = (params.inverse_temperatures > 0) & (params.targets < 0)
    if bool(is_drawn.any()):
        scale = scale.where(is_drawn[:, None], 1.0)
        mass = masses(x, maximum, scale)
        mass = mass.where(_survivors(x, mass, maximum, scale, params), 0)
        ends = mass.cumsum(-1)
        randoms = random_words(params.seeds, params.positions)
        points = multiply_high(randoms, ends[:, -1])
        drawn = (ends <= points[:, None]).sum(-1)
        tokens = tokens.where(~is_drawn, drawn)
    tokens = tokens.where(params.targets < 0, params.targets.long())
    status = torch.zeros_like(tokens)
    status[is_banned] = SAMPLED_NOTHING_ALLOWED
    status[is_flawed] = SAMPLED_NOT_FINITE
    tokens = tokens.where(status == 0, -1)
    found = torch.stack([tokens, status]).to(torch.int32)
    # What has no token failed; whatever awaits it is dropped, but reads the embedding first.
    params.kept[params.kept_at.long()] = found[0].clamp(min=0)
    return found


def first_argmax(x: Tensor, maximum: Tensor) -> Tensor:
    """Of equals the lowest id; torch's own argmax promises none."""
    ids = torch.arange(x.shape[-1], device=x.device)
    return ids.where(x == maximum, x.shape[-1]).amin(-1)


def masses(x: Tensor, maximum: Tensor, scale: Tensor | float) -> Tensor:
    """exp((x - maximum) * scale) in units of 2^-42, int64: every step on its own in float32."""
    t = ((x - maximum) * scale).clamp(min=-64.0)
    shifted = t * 1.44269504088896341 + 12582912.0
    n = shifted - 12582912.0
    r = (t - n * 0.693359375) - n * -2.12194440e-4
    y = torch.full_like(r, 1.9875691500e-4)
    for coefficient in _COEFFICIENTS:
        y = y * r + coefficient
    y = (y * (r * r) + r) + 1.0
    power = ((n.int() + (127 + MASS_BITS)) << 23).view(torch.float32)
    units: Tensor = (y * power).round().long()
    return units


def sort_keys(x: Tensor) -> Tensor:
    """int64 keys whose descending order is x descending, then id ascending; no two are equal."""
    bits = (x + 0.0).view(torch.int32).long()
    ordered = bits.where(bits >= 0, bits ^ 0x7FFFFFFF)
    ids = torch.arange(x.shape[-1], device=x.device)
    return (ordered << 32) | (_LOW - ids)


def _survivors(
    x: Tensor, mass: Tensor, maximum: Tensor, scale: Tensor, params: DrawParams
) -> Tensor:
    is_in = (x - maximum) * scale >= params.leasts[:, None]
    has_top = (params.top_ks > 0) | (params.top_ps < 1)
    if not bool(has_top.any()):
        return is_in
    order = sort_keys(x).argsort(dim=-1, descending=True)
    in_order = is_in.gather(-1, order)
    top_ks = params.top_ks[:, None]
    in_order &= (in_order.cumsum(-1) <= top_ks) | (top_ks <= 0)
    mass_in_order = mass.gather(-1, order).where(in_order, 0)
    ends = mass_in_order.cumsum(-1)
    total = ends[:, -1:]
    share = torch.ceil(params.top_ps[:, None].double() * total.double()).long()
    share = share.clamp(min=1).minimum(total)
    in_order &= (ends - mass_in_order < share) | (params.top_ps[:, None] >= 1)
    return torch.zeros_like(is_in).scatter_(-1, order, in_order)


def random_words(seeds: Tensor, positions: Tensor) -> Tensor:
    """The first two words of Philox-4x32-10 as one number; its bits in an int64."""
    k0, k1 = seeds.long() & _LOW
    w0, w1, w2, w3 = positions.long(), *torch.zeros((3, len(positions)), dtype=torch.int64,
                                                    device=positions.device)  # fmt: skip
    for _ in range(10):
        a, b = w0 * 0xD2511F53, w2 * 0xCD9E8D57
        w0, w1, w2, w3 = (b >> 32 & _LOW) ^ w1 ^ k0, b & _LOW, (a >> 32 & _LOW) ^ w3 ^ k1, a & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    words: Tensor = w1 << 32 | w0
    return words


def multiply_high(a: Tensor, b: Tensor) -> Tensor:
    """The upper half of the product of two unsigned 64-bit numbers, of which b is below 2^63."""
    a_low, a_high, b_low, b_high = a & _LOW, a >> 32 & _LOW, b & _LOW, b >> 32 & _LOW
    middle = (a_low * b_low >> 32 & _LOW) + (a_low * b_high & _LOW) + (a_high * b_low & _LOW)
    upper = (a_low * b_high >> 32 & _LOW) + (a_high * b_low >> 32 & _LOW)
    return a_high * b_high + upper + (middle >> 32)
