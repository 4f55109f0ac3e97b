"""Which formats a server reads: by flag, by plug-in, by the model's own template."""

from __future__ import annotations

import pytest

from octavo_engine.dialects.formats import REASONING_FORMATS, TOOL_FORMATS
from octavo_engine.errors import ConfigError
from octavo_engine.server.openai.chat.dialect import Dialect, choose, known_formats
from octavo_engine.server.settings import ServerSettings
from octavo_engine.tokenization.chat_template import ChatTemplate
from tests.fakes.engine import FakeTokenizer

QWEN = '{{ tools }}<tool_call>\n{"name": f}</tool_call><think></think>'
SILENT = '<tool_call>\n{"name": f}</tool_call><think></think>'


class MarkedTokenizer(FakeTokenizer):
    """Some of its special tokens are marks."""

    MARKS = {256: "<tool_call>", 257: "<|im_end|>", 258: "</tool_call>", 259: "<think>"}  # noqa: RUF012

    def __init__(self, template: str) -> None:
        self.chat_template = ChatTemplate(template)  # type: ignore[assignment]

    def token_text(self, token: int) -> str:
        return self.MARKS.get(token, "")


def chosen(using: ServerSettings, tokenizer: FakeTokenizer) -> Dialect:
    return choose(using, tokenizer, known_formats(using))  # type: ignore[arg-type]  # it behaves


def test_auto_takes_what_the_template_shows_and_the_tokens_that_it_needs():
    dialect = chosen(ServerSettings(), MarkedTokenizer(QWEN))

    assert dialect.tools is TOOL_FORMATS["hermes"]
    assert dialect.reasoning is REASONING_FORMATS["qwen3"]
    assert (dialect.tool_ids, dialect.reasoning_ids) == ((256, 258), (259,))


@pytest.mark.parametrize("template", [SILENT, "{{ messages[0].content }}"])
def test_tools_that_a_template_does_not_show_are_described(template):
    dialect = chosen(ServerSettings(), MarkedTokenizer(template))

    assert dialect.tools is TOOL_FORMATS["generic"]
    assert dialect.describes_tools
    assert not chosen(ServerSettings(), MarkedTokenizer(QWEN)).describes_tools
    using = ServerSettings(tool_call_parser="hermes")
    assert not chosen(using, MarkedTokenizer(template)).describes_tools


def test_a_name_wins_over_the_template_and_none_switches_off():
    using = ServerSettings(tool_call_parser="deepseekv31", reasoning_parser="none")
    dialect = chosen(using, MarkedTokenizer(QWEN))

    assert dialect.tools is TOOL_FORMATS["deepseek_v31"]
    assert dialect.reasoning is None


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        ("--tool-call-parser", ServerSettings(tool_call_parser="klingon")),
        ("--reasoning-parser", ServerSettings(reasoning_parser="klingon")),
        ("--tool-parser-plugin", ServerSettings(tool_parser_plugin="/nowhere/plugin.py")),
        ("--reasoning-parser-plugin", ServerSettings(reasoning_parser_plugin="/nowhere/plug.py")),
    ],
)
def test_what_is_not_there_is_said_before_the_server_starts(flag, settings):
    with pytest.raises(ConfigError, match=flag):
        known_formats(settings)


def test_a_plug_in_brings_formats_of_its_own(tmp_path):
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        "from octavo_engine.dialects.formats import ToolFormat\n"
        "from octavo_engine.dialects.json_calls import JsonCalls\n"
        "TOOL_FORMATS = {'mine': ToolFormat(syntax=JsonCalls(begins=('<<call>>',)))}\n"
    )
    using = ServerSettings(tool_parser_plugin=str(plugin), tool_call_parser="mine")
    dialect = chosen(using, FakeTokenizer())

    assert dialect.tools is not None
    assert dialect.tools.syntax.begins == ("<<call>>",)  # type: ignore[attr-defined]


def test_a_plug_in_that_breaks_is_the_operators_to_mend(tmp_path):
    plugin = tmp_path / "plugin.py"
    plugin.write_text("1 / 0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        known_formats(ServerSettings(tool_parser_plugin=str(plugin)))


def test_a_file_for_reasoning_may_stand_beside_one_for_calls(tmp_path):
    plugin = tmp_path / "thoughts.py"
    plugin.write_text(
        "from octavo_engine.dialects.reasoning import ReasoningFormat\n"
        "REASONING_FORMATS = {'mine': ReasoningFormat(opens=('{{',), closes=('}}',))}\n"
    )
    using = ServerSettings(reasoning_parser_plugin=str(plugin), reasoning_parser="mine")
    dialect = chosen(using, FakeTokenizer())

    assert dialect.reasoning is not None
    assert dialect.reasoning.opens == ("{{",)
