"""The parts that adapters on a device are made of: tiles, arenas, packed bytes, both products."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from octavo_engine.backends.adapters import AdapterLimits, AdapterSite, SitePart
from octavo_engine.backends.torch.adapter_tiles import AdapterCut, cut_rows
from octavo_engine.backends.torch.adapter_upload import AdapterUploader
from octavo_engine.backends.torch.arena_book import ArenaBook, ArenaPlacement
from octavo_engine.backends.torch.device_adapters import SPARE_ARENAS, DeviceAdapters
from octavo_engine.backends.torch.landing import marks_of
from octavo_engine.backends.torch.plain import PlainKernels
from octavo_engine.models.config import ModelConfig
from tests.engine.backends.torch_cuda.steps import LIMITS, make_step, on_device_adapted
from tests.engine.models.tiny import tiny_model

# ── tiles ──


@pytest.mark.parametrize("rows_per_tile", [1, 4, 16])
def test_tiles_hold_each_row_with_an_adapter_once(rows_per_tile):
    rng = np.random.default_rng(rows_per_tile)
    for num_rows in (1, 5, 40):
        arenas = rng.integers(-1, 4, num_rows).astype(np.int32)
        tiles = cut_rows(arenas, rows_per_tile)
        assert len(tiles.rows) == len(tiles.arenas) * rows_per_tile
        found = np.full(num_rows, -1)
        for number, row in enumerate(tiles.rows):
            if row >= 0:
                assert found[row] == -1
                found[row] = tiles.arenas[number // rows_per_tile]
        assert found.tolist() == arenas.tolist()


@pytest.mark.parametrize("invariant", [False, True])
def test_a_step_has_room_for_every_mixture(invariant):
    cut = AdapterCut(8, invariant)
    rng = np.random.default_rng(0)
    for num_tokens, num_seqs in ((1, 1), (64, 64), (500, 3), (512, 20), (700, 5), (900, 900)):
        per_tile = cut.rows_per_tile(num_tokens)
        for _ in range(20):
            owners = np.sort(rng.integers(0, num_seqs, num_tokens))
            arenas = rng.integers(-1, 8, num_seqs).astype(np.int32)[owners]
            tiles = cut_rows(arenas, per_tile)
            assert len(tiles.arenas) <= cut.tiles(num_tokens, num_seqs)
            assert cut.tiles(num_tokens, num_seqs) <= cut.most(900, 900)[0]
            assert per_tile * cut.tiles(num_tokens, num_seqs) <= cut.most(900, 900)[1]


def test_parts_of_inputs_are_whole_and_no_more_than_the_workspace_has_room_for():
    for invariant in (False, True):
        cut = AdapterCut(4, invariant)
        for num_inputs in (48, 576, 4096, 14336):
            for num_tokens in (1, 512, 513, 8192):
                split = cut.split(num_inputs, num_tokens)
                assert (split.num_parts - 1) * split.num_inputs < num_inputs
                assert split.num_parts * split.num_inputs >= num_inputs
                assert split.num_inputs % 128 == 0
                needed = split.num_parts * num_tokens * 48
                assert needed <= cut.workspace_values(num_inputs, 48, 8192)
        assert {cut.split(14336, n).num_parts for n in (1, 8192)} == ({4} if invariant else {16, 1})


# ── which adapter is where ──


def test_a_placed_adapter_stays_and_one_that_left_is_still_there():
    book = ArenaBook(2, 3)
    assert book.place(0, "a") == ArenaPlacement(0, must_fill=True)
    assert book.place(1, "b") == ArenaPlacement(1, must_fill=True)
    assert book.place(0, "c") == ArenaPlacement(2, must_fill=True, released=0)
    assert book.place(0, "a") == ArenaPlacement(0, must_fill=False, released=2)
    assert book.of_slots.tolist() == [0, 1]
    assert book.placed == {0: "a", 1: "b"}


def test_an_expected_adapter_is_sent_once_and_not_displaced_by_another_expected_one():
    book = ArenaBook(1, 3)
    book.place(0, "a")
    assert (book.expect("a"), book.expect("b"), book.expect("c")) == (None, 1, 2)
    assert (book.expect("d"), book.expect("b")) == (None, None)
    assert book.place(0, "c") == ArenaPlacement(2, must_fill=False, released=0)
    assert book.expect("d") == 0  # no one waits for a any more
    # Who has a slot comes first, though: the longest expected one goes.
    assert book.place(0, "e") == ArenaPlacement(2, must_fill=True, released=2)
    assert book.place(0, "b") == ArenaPlacement(1, must_fill=False, released=2)


def test_slots_may_share_an_adapter_and_what_failed_to_arrive_is_nowhere():
    book = ArenaBook(2, 3)
    book.place(0, "a")
    assert book.place(1, "a") == ArenaPlacement(0, must_fill=False)
    assert (book.empty(0), book.empty(1), book.empty(1)) == (-1, 0, -1)
    book.place(0, "a")
    book.lose(0)
    assert book.of_slots.tolist() == [-1, -1] and book.placed == {}
    assert book.place(0, "a").must_fill
    book.place(1, "b")
    book.empty(1)
    book.forget_idle()
    assert book.placed and not book.place(0, "a").must_fill and book.place(1, "b").must_fill


# ── on their way ──


def test_an_adapter_goes_through_small_buffers_once_its_place_is_free(device):
    uploader = AdapterUploader(device, buffer_bytes=100)
    log: list[str] = []

    class Mark:
        def wait(self):
            log.append("free")

    for size in (1, 100, 101, 1234):
        data = torch.randint(0, 255, (size,), dtype=torch.uint8)
        place = torch.zeros(size, dtype=torch.uint8, device=device)
        uploader.begin(place, data, Mark() if size == 1234 else None).result()
        assert torch.equal(place.cpu(), data)
    assert log == ["free"]
    with pytest.raises(RuntimeError):
        uploader.begin(torch.zeros(3, dtype=torch.uint8, device=device),
                       torch.zeros(4, dtype=torch.uint8), None).result()  # fmt: skip
    uploader.close()


# ── the products ──

SITES = [
    AdapterSite(("q", "k", "v"), (64, 32, 32), 48),
    AdapterSite(("odd",), (24,), 768),
    AdapterSite(("wide", "narrow"), (130, 40), 128),
]


def made(device, dtype, *, num_slots=4, max_rank=64, invariant=False):
    adapters = DeviceAdapters(
        ModelConfig.from_hf(tiny_model("llama").config), SITES, AdapterLimits(num_slots, max_rank),
        device=device, dtype=dtype, batch_invariant=invariant, make_mark=marks_of(device),
    )  # fmt: skip
    adapters.prepare(LIMITS)
    return adapters


def random_parts(rank, seed, skipped=()):
    """Of every layer's parts but some."""
    rng = np.random.default_rng(seed)
    parts: dict[int, list[SitePart]] = {}
    for number, site in enumerate(SITES):
        for part, size in enumerate(site.sizes):
            if (number, part) not in skipped:
                down = rng.normal(0, site.columns**-0.5, (rank, site.columns)).astype(np.float32)
                up = rng.normal(0, 0.5, (size, rank)).astype(np.float32)
                parts.setdefault(number, []).append(SitePart(part, down, up, 0.5 + seed))
    return parts


def truth_of(y, x, slots, packed, site):
    y = y.double().cpu()
    for row, slot in enumerate(slots):
        place = 0
        for part, size in enumerate(SITES[site].sizes):
            for each in packed[slot].get(site, ()) if slot >= 0 else ():
                if each.part == part:
                    down, up = (torch.from_numpy(m).double() for m in (each.down, each.up))
                    added = each.scale * (up @ (down @ x[row].double().cpu()))
                    y[row, place : place + size] += added
            place += size
    return y


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("kernels", ["plain", "triton"])
def test_each_row_gets_what_its_own_adapter_adds(kernels, invariant, device):
    adapters = made(device, torch.float32, invariant=invariant)
    packed = {0: random_parts(4, 0), 1: random_parts(33, 1, [(0, 1), (1, 0)]),
              3: random_parts(16, 2)}  # fmt: skip
    for slot, parts in packed.items():
        adapters.place(slot, adapters.pack_parts(parts))
    slots = [3, -1, 1, 0, 0, -1, 1, 3, 3, 0]
    step = on_device_adapted(make_step([(5, 1)] * 10), device, adapters, slots)
    generator = torch.Generator().manual_seed(1)
    for number, site in enumerate(SITES):
        x = torch.randn((10, site.columns), generator=generator).to(device)
        before = torch.randn((10, sum(site.sizes)), generator=generator).to(device)
        y = before.clone()
        launch(kernels, device)(y, x, adapters.sites[number], adapters.arenas, step)
        truth = truth_of(before, x, slots, packed, number)
        np.testing.assert_allclose(y.cpu().numpy(), truth.numpy(), rtol=2e-5, atol=2e-5)
        for row, slot in enumerate(slots):
            assert torch.equal(y[row], before[row]) == (slot < 0 or (slot, number) == (1, 1))
    adapters.close()


def launch(kernels, device):
    if kernels == "plain":
        return PlainKernels().add_adapters
    from octavo_engine.backends.torch.triton.adapters import add_adapters

    return add_adapters


@pytest.mark.parametrize("rank", [8, 64])
def test_many_rows_are_cut_in_larger_tiles(rank, device, monkeypatch):
    from octavo_engine.backends.torch import adapter_tiles

    monkeypatch.setattr(adapter_tiles, "FEW_TOKENS", 8)
    adapters = made(device, torch.float32, max_rank=rank)
    packed = {0: random_parts(rank, 0), 2: random_parts(5, 1)}
    for slot, parts in packed.items():
        adapters.place(slot, adapters.pack_parts(parts))
    of_seqs = [2, -1, 0]
    step = on_device_adapted(make_step([(0, 70), (3, 4), (0, 9)]), device, adapters, of_seqs)
    assert step.adapter_tiles is not None and step.adapter_rows is not None
    assert len(step.adapter_rows) == 64 * len(step.adapter_tiles)
    slots = np.repeat(of_seqs, [70, 4, 9]).tolist()
    x = torch.randn((83, 48), generator=torch.Generator().manual_seed(2)).to(device)
    y = torch.zeros((83, 128), device=device)
    launch("triton", device)(y, x, adapters.sites[0], adapters.arenas, step)
    truth = truth_of(torch.zeros(83, 128), x, slots, packed, 0)
    np.testing.assert_allclose(y.cpu().numpy(), truth.numpy(), rtol=2e-5, atol=2e-5)
    adapters.close()


@pytest.mark.usefixtures("row_by_row")
def test_batch_invariant_sums_do_not_depend_on_the_number_of_rows(device, monkeypatch):
    """768 inputs are cut in parts, steps of more than eight tokens in another way."""
    from octavo_engine.backends.torch import adapter_tiles

    monkeypatch.setattr(adapter_tiles, "FEW_TOKENS", 8)
    assert AdapterCut(4).split(768, 1) != AdapterCut(4).split(768, 12)
    adapters = made(device, torch.float32, invariant=True)
    adapters.place(0, adapters.pack_parts(random_parts(20, 0)))
    x = torch.randn((12, 768), generator=torch.Generator().manual_seed(2)).to(device)
    results = []
    for num_rows in (1, 12):
        step = on_device_adapted(make_step([(5, 1)] * num_rows), device, adapters, [0] * num_rows)
        y = torch.zeros((num_rows, 24), device=device)
        launch("triton", device)(y, x[:num_rows].contiguous(), adapters.sites[1],
                                 adapters.arenas, step)  # fmt: skip
        results.append(y[0])
    assert torch.equal(*results)
    adapters.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_as_near_as_they_can_be(dtype, device):
    kernels = ["plain"]
    if device.type == "cuda" and torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
        kernels.append("triton")
    adapters = made(device, dtype)
    packed = {1: random_parts(24, 1)}
    adapters.place(1, adapters.pack_parts(packed[1]))
    step = on_device_adapted(make_step([(5, 1)] * 5), device, adapters, [1, 1, -1, 1, 1])
    x = torch.randn((5, 768), generator=torch.Generator().manual_seed(3)).to(device, dtype)
    for name in kernels:
        y = torch.zeros((5, 24), dtype=dtype, device=device)
        launch(name, device)(y, x, adapters.sites[1], adapters.arenas, step)
        truth = truth_of(torch.zeros(5, 24), x, [1, 1, -1, 1, 1], packed, 1)
        assert float((y.cpu().double() - truth).norm() / truth.norm()) < 0.01
    adapters.close()


# ── the memory ──


def test_bytes_are_those_of_the_ranks_and_arenas_have_room_for_the_highest(device):
    adapters = made(device, torch.float16, num_slots=2, max_rank=33)
    data = adapters.pack_parts(random_parts(33, 0)).data
    assert len(data) == adapters.arena_bytes  # 33 is padded to 48
    assert adapters.num_bytes == (2 + SPARE_ARENAS) * adapters.arena_bytes
    low = len(adapters.pack_parts(random_parts(3, 0)).data)
    head = 16 * 6 + 32  # padded to 64 bytes
    assert head + (len(data) - head) / 3 - 64 <= low <= head + (len(data) - head) / 3 + 64
    adapters.close()


def test_an_empty_slot_is_refused_and_an_emptied_one(device):
    adapters = made(device, torch.float32)
    adapters.place(1, adapters.pack_parts(random_parts(4, 0)))
    on_device_adapted(make_step([(5, 1)] * 2), device, adapters, [1, -1])
    adapters.place(1, None)
    with pytest.raises(ValueError, match="slot 1, which is empty"):
        on_device_adapted(make_step([(5, 1)] * 2), device, adapters, [1, -1])
    adapters.close()


def test_what_slots_hold_comes_back_after_sleep_and_what_was_expected_does_not(device):
    adapters = made(device, torch.float32, num_slots=1)
    first, second = (adapters.pack_parts(random_parts(4, seed)) for seed in range(2))
    adapters.place(0, first)
    adapters.expect(second)
    assert adapters._book.expect(second) is None
    adapters.release()
    adapters.expect(second)  # nowhere to send it to
    with pytest.raises(AssertionError, match="sleep"):
        _ = adapters.arenas
    adapters.restore()
    on_device_adapted(make_step([(5, 1)]), device, adapters, [0])
    arena = int(adapters._book.of_slots[0])
    there = adapters.arenas.values[arena].view(torch.uint8)[: len(first.data)]
    assert torch.equal(there.cpu(), first.data)
    assert adapters._book.expect(second) is not None
    adapters.close()


def test_a_failed_upload_fails_its_step_and_can_be_tried_again(device):
    adapters = made(device, torch.float32)
    good = adapters.pack_parts(random_parts(4, 0))
    begin = adapters._uploader.begin
    adapters._uploader.begin = lambda place, data, free_from: begin(place[:3], data, free_from)
    adapters.place(0, good)
    with pytest.raises(RuntimeError):
        on_device_adapted(make_step([(5, 1)]), device, adapters, [0])
    adapters._uploader.begin = begin
    with pytest.raises(ValueError, match="slot 0"):
        on_device_adapted(make_step([(5, 1)]), device, adapters, [0])
    adapters.place(0, good)
    on_device_adapted(make_step([(5, 1)]), device, adapters, [0])
    adapters.close()


def test_a_place_is_filled_only_when_steps_under_way_have_read_it(device):
    """Marks that are made when a slot changes are waited for before its arena is filled."""
    log: list[tuple[str, int]] = []

    class Mark:
        def __init__(self):
            self.number = len(log)
            log.append(("made", self.number))

        def wait(self):
            log.append(("waited", self.number))

    adapters = made(device, torch.float32, num_slots=1)
    adapters._make_mark = Mark
    made_ones = [adapters.pack_parts(random_parts(4, seed)) for seed in range(4)]
    for packed in made_ones:  # the arenas of a slot and two spare ones, then the first again
        adapters.place(0, packed)
    on_device_adapted(make_step([(5, 1)]), device, adapters, [0])
    assert log[:3] == [("made", 0), ("made", 1), ("made", 2)]
    assert log[3:] == [("waited", 0)]
    adapters.close()
