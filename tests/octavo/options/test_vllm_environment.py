"""VLLM_* variables: one sentence each, that names variables which exist."""

from __future__ import annotations

import re

from octavo.options.flags import ENGINE_FLAGS, OTHER_ENV, SERVER_FLAGS
from octavo.options.settings import warn_of_unknown_environment
from octavo.options.vllm_environment import ADVICE, vllm_environment_advice


def test_the_variables_that_are_named_exist():
    known = {flag.env for flag in (*ENGINE_FLAGS, *SERVER_FLAGS)} | OTHER_ENV
    for name, sentence in ADVICE.items():
        for variable in re.findall(r"OCTAVO_\w+", sentence):
            assert variable in known, name


def test_each_variable_is_warned_of_once(capsys):
    warn_of_unknown_environment({"VLLM_API_KEY": "x", "VLLM_NEW": "1", "OCTAVO_NO_SUCH": "1"})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert "octavo: warning: VLLM_API_KEY is not read: set OCTAVO_API_KEY" in lines
    assert any("VLLM_NEW" in line and "--help=all" in line for line in lines)


def test_links_to_a_service_named_vllm_are_not_settings():
    links = {
        "VLLM_SERVICE_HOST": "10.0.0.1", "VLLM_PORT": "tcp://10.0.0.1:8000",
        "VLLM_PORT_8000_TCP": "tcp://10.0.0.1:8000", "VLLM_SERVICE_PORT_HTTP": "8000",
    }  # fmt: skip
    assert vllm_environment_advice(links) == {}
    assert list(vllm_environment_advice({"VLLM_PORT": "8000"})) == ["VLLM_PORT"]
