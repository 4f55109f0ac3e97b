"""A gpt-oss with experts in 4 bits answers chats over its own template and harmony's channels.

Its weights are random but for what makes each token be followed by one of our choice.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from octavo_engine.dialects.harmony import SPECIAL
from tests.engine.server.openai.chat.test_pictures import Rig
from tests.engine.weights.test_mxfp4 import packed_model, write_folder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TEMPLATE = (
    "<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>"
    "{% if tools %}<|start|>developer<|message|>{% for tool in tools %}"
    "type {{ tool.function.name }} = {{ tool.function.parameters | tojson }}{% endfor %}<|end|>"
    "{% endif %}{% for message in messages %}<|start|>{{ message.role }}<|message|>"
    "{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    "{# an answer: <|channel|>final<|message|>... #}"
)
ASKED = [{"role": "user", "content": "Rain?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
}
SCALE = 0.01  # of what layers add, beside an embedding of length one


def tokenizer(words: Sequence[str]) -> Tokenizer:
    """Bytes, harmony's marks, and words that are one token each."""
    letters = sorted(ByteLevel.alphabet())
    made = Tokenizer(BPE({letter: index for index, letter in enumerate(letters)}, []))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.decoder = ByteLevelDecoder()
    made.add_special_tokens([AddedToken(mark, special=True) for mark in SPECIAL])
    made.add_tokens([AddedToken(word, normalized=False) for word in words])
    return made


def write_model(folder: Path, answer: Sequence[str]) -> Path:
    """Behind "assistant" comes the answer, token by token; each may occur once."""
    words = ["assistant", *(word for word in answer if word not in SPECIAL)]
    made = tokenizer(words)
    model, stored = packed_model(vocab_size=made.get_vocab_size())
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(stored["model.embed_tokens.weight"].shape, generator=generator)
    embedding = rows / rows.norm(dim=1, keepdim=True)
    head = torch.zeros_like(embedding)
    ids = [made.token_to_id(token) for token in ("assistant", *answer)]
    for before, after in pairwise(ids):
        head[after] = embedding[before]
    stored["model.embed_tokens.weight"], stored["lm_head.weight"] = embedding, head
    stored["model.norm.weight"] = torch.ones_like(stored["model.norm.weight"])
    for name, tensor in stored.items():
        if ".o_proj." in name or name.endswith("down_proj_bias"):
            stored[name] = tensor * SCALE
        elif name.endswith("down_proj_scales"):
            stored[name] = tensor - 7  # powers of two
    write_folder(folder, model, stored)
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = [made.token_to_id(mark) for mark in ("<|return|>", "<|call|>")]
    (folder / "config.json").write_text(json.dumps(config))
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def chat(folder: Path, **fields: Any) -> dict[str, Any]:
    rig = Rig(folder)
    try:
        body = {"messages": ASKED, "temperature": 0, "max_tokens": 20, **fields}
        status, answer = rig.post("/v1/chat/completions", body)
    finally:
        rig.close()
    assert status == 200, answer
    choice: dict[str, Any] = answer["choices"][0]
    return choice


@pytest.mark.parametrize(
    ("channel", "content", "reasoning"),
    [("final", "It rains.", None), ("analysis", None, "It rains.")],
)
def test_a_message_is_read_by_its_channel(
    tmp_path: Path, channel: str, content: str | None, reasoning: str | None
) -> None:
    answer = ["<|channel|>", channel, "<|message|>", "It", " rains", ".", "<|return|>"]
    choice = chat(write_model(tmp_path, answer))
    assert choice["finish_reason"] == "stop"
    assert (choice["message"].get("content") or None) == content
    assert choice["message"].get("reasoning") == reasoning


def test_a_call_is_read(tmp_path: Path) -> None:
    answer = ["<|channel|>", "commentary", " to=functions.", "get_weather", " ", "<|constrain|>",
              "json", "<|message|>", '{"city": ', '"Oslo"}', "<|call|>"]  # fmt: skip
    choice = chat(write_model(tmp_path, answer), tools=[WEATHER])
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
