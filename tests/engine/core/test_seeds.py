"""Seeds: the caller's decides, then the engine's, then chance."""

from octavo_engine.core.seeds import Seeds, key, prompt_seed


def test_keys_differ_by_seed_and_answer_and_fit_64_bits():
    keys = {key(seed, index) for seed in (-(2**63), -1, 0, 1, 2, 2**63 - 1) for index in range(128)}
    assert len(keys) == 6 * 128
    assert all(0 <= k < 2**64 for k in keys)


def test_the_key_of_a_seed_never_changes():
    assert key(0, 0) == 0xE220A8397B1DCDAF  # the first number of splitmix64 from state 0


def test_a_callers_seed_is_kept():
    assert Seeds(7).settle(-3) == -3
    assert Seeds(0).settle(0) == 0


def test_with_an_engine_seed_the_same_order_gives_the_same_seeds():
    first, again, other = Seeds(7), Seeds(7), Seeds(8)
    drawn = [first.settle(None) for _ in range(5)]
    assert drawn == [again.settle(None) for _ in range(5)]
    assert drawn != [other.settle(None) for _ in range(5)]
    assert len(set(drawn)) == 5


def test_without_an_engine_seed_it_is_chance():
    assert len({Seeds(0).settle(None) for _ in range(20)}) == 20


def test_prompts_of_one_request_that_gives_no_seed_have_different_ones_that_a_client_could_give():
    seeds = [prompt_seed(2**64 - 5, index) for index in range(1000)]
    assert seeds[0] == -5  # the same 64 bits: the same answers
    assert len(set(seeds)) == 1000
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    # An answer of one prompt is no answer of another.
    assert len({key(seed, index) for seed in seeds[:50] for index in range(50)}) == 2500
