"""The load on a page: found by name, and the same as reading the page line by line."""

import re
from random import Random

import pytest

from octavo_router.signals.plain_load import PlainLoad, _samples

NAMES = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "sglang:token_usage",
    "octavo_num_queued_tokens", "process_start_time_seconds",
)  # fmt: skip
LINE = re.compile(r"([^\s{]+)(?:\{.*\})?[ \t]+(\S+)")


def line_by_line(page: str) -> list[tuple[str, str]]:
    """The obvious way."""
    found = []
    for line in page.split("\n"):
        match = LINE.match(line)
        if match and match[1] in NAMES:
            found.append((match[1], match[2]))
    return sorted(found)


def line(random: Random) -> str:
    name = random.choice([*NAMES, "vllm:num_requests_running_now", "other", "# HELP", ""])
    labels = random.choice(["", "{}", '{engine="0"}', '{a="b c",d="}"}', "{", "\t"])
    value = random.choice(["1", "2.5", "NaN", "+Inf", "x", "", "3 1700000000", "1e3"])
    return random.choice(["", "", "", " ", "x"]) + name + labels + random.choice(" \t") + value


@pytest.mark.parametrize("seed", range(200))
def test_a_page_says_what_its_lines_say(seed: int):
    random = Random(seed)
    page = "\n".join(line(random) for _ in range(random.randrange(30)))
    found = sorted(
        (name, text.decode()) for name in NAMES for text in _samples(page.encode(), name.encode())
    )
    assert found == line_by_line(page)


def test_one_fact_under_two_names_counts_once():
    ranks = "".join(
        f'{name}{{engine="{rank}"}} {number}\n'
        for name in ("vllm:num_requests_running", "octavo_num_requests_running")
        for rank, number in enumerate((3, 4))
    )
    load = PlainLoad(ranks.encode()).load
    assert load is not None and load.running == 7


def test_a_name_within_a_line_is_no_sample():
    page = b"# HELP vllm:num_requests_running 5\nx_vllm:num_requests_running 5\n"
    assert PlainLoad(page).load is None
