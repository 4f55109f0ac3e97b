"""Heads learn what a model writes next, and what is written is what the engine loads."""

from __future__ import annotations

import json
import random
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.speculation import eagle3, medusa
from benchmarks.speculation.answers import (
    Answer,
    common_tokens,
    split_answers,
    training_requests,
    write_answers,
)
from benchmarks.speculation.score import NO_TARGET
from benchmarks.speculation.states import ModelStates
from benchmarks.speculation.training import columns_of
from octavo_engine.backends.draft_head_files import open_draft_head
from octavo_engine.backends.head_files import open_heads
from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.config import EngineConfig
from octavo_engine.models.config import ModelConfig
from octavo_engine.weights.source import resolve_model
from tests.engine.core.test_speculation import make_engine, run
from tests.engine.models.tiny import TinyModel, tiny_model
from tests.fakes.medusa_heads import native
from tests.fakes.torch_threads import one_torch_thread

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WISHES: list[dict[str, Any]] = [
    {"prompt": [7 * index + 1, 9, 40], "request_id": str(index), "temperature": 0.0,
     "max_tokens": 40, "ignore_eos": True}
    for index in range(6)
]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_model("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def answers(model: TinyModel) -> list[Answer]:
    engine = make_engine(native(model, None), num_blocks=60)
    outputs = run(engine, WISHES, random.Random(0))
    engine.close()
    return [Answer([*wish["prompt"], *outputs[wish["request_id"]].tokens], 3) for wish in WISHES]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Of torch: more wait for each other where tests share the cores."""
    with one_torch_thread():
        yield


@pytest.fixture
def folder(model: TinyModel, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.config))
    tensors = {name: tensor.contiguous().clone() for name, tensor in model.tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def states(folder: Path) -> Iterator[ModelStates]:
    states = ModelStates(str(folder), num_threads=1)
    yield states
    states.close()


@pytest.fixture
def layers(folder: Path) -> Iterator[ModelStates]:
    states = ModelStates(str(folder), kept_layers=eagle3.kept_layers, num_threads=1)
    yield states
    states.close()


def test_each_token_has_the_state_that_it_was_sampled_from(
    model: TinyModel, answers: list[Answer], states: ModelStates
) -> None:
    for answer in answers:
        with torch.inference_mode():
            ids = torch.tensor([answer.token_ids[:-1]])
            expected = model.reference.model(input_ids=ids)[0][0, 2:].numpy()
        got = states.hidden(answer)
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected, atol=0.1 * np.abs(expected).max())


def test_each_position_has_the_states_behind_some_layers_and_all(
    model: TinyModel, answers: list[Answer], layers: ModelStates
) -> None:
    assert eagle3.kept_layers(4) == (2, 3, 4, 4) and eagle3.kept_layers(30) == (2, 15, 29, 30)
    for answer in answers[:2]:
        with torch.inference_mode():
            ids = torch.tensor([answer.token_ids[:-1]])
            output = model.reference(input_ids=ids, output_hidden_states=True)
        got = layers.layers(answer)
        assert got.shape == (42, 4 * 64)
        expected = output.hidden_states[2][0].numpy()
        np.testing.assert_allclose(got[:, :64], expected, atol=0.1 * np.abs(expected).max())


def test_a_head_is_taught_what_the_model_itself_says(
    answers: list[Answer], layers: ModelStates
) -> None:
    """The likeliest token by a state behind all layers is the one that was written greedily."""
    examples = [eagle3.example_of(layers, answer) for answer in answers]
    config = eagle3.head_config(layers, 256)
    _, teacher = eagle3.make_head(config, layers, np.arange(256), examples)
    for one, answer in zip(examples, answers, strict=True):
        last = teacher.normed(one.states[one.first :, -64:])
        logits = last @ teacher.output.float().T
        written = torch.tensor(answer.token_ids[3:])
        behind = logits.max(dim=-1).values - logits.gather(1, written[:, None])[:, 0]
        assert float(behind.max()) < 0.05 * float(logits.std())


def test_a_head_begins_with_what_a_linear_layer_can_guess(
    answers: list[Answer], layers: ModelStates
) -> None:
    """Its first state is nearer to the model's next one than the model's last one is."""
    examples = [eagle3.example_of(layers, answer) for answer in answers]
    config = eagle3.head_config(layers, 256)
    torch.manual_seed(0)
    head, teacher = eagle3.make_head(config, layers, np.arange(256), examples)

    def far(states: torch.Tensor, one: eagle3.Example) -> float:
        there = teacher.normed(one.states[one.first + 1 :, -64:])
        return float((states - there).square().sum() / there.square().sum())

    with torch.inference_mode():
        for one in examples[:3]:
            (state,) = head.passes([one], 1)
            before = teacher.normed(one.states[one.first : -1, -64:])
            assert far(head.last(state)[:-1], one) < 0.85 * far(before, one)


def test_head_k_is_to_guess_the_token_behind_the_k_next_ones(
    answers: list[Answer], states: ModelStates
) -> None:
    examples = medusa.examples_of(states, answers[:2], 3)
    assert len(examples.hidden) == len(examples.targets) == 80
    written = answers[0].token_ids[3:]
    assert examples.targets[0].tolist() == written[1:4]
    assert examples.targets[37].tolist() == [*written[38:40], NO_TARGET]
    assert examples.targets[39].tolist() == [NO_TARGET] * 3


def test_common_tokens_are_the_most_frequent_ones_filled_up() -> None:
    answers = [Answer([5, 5, 5, 7, 7, 2], 1)]
    assert common_tokens(answers, 2, 10).tolist() == [5, 7]
    assert common_tokens(answers, 5, 10).tolist() == [0, 1, 2, 5, 7]
    assert common_tokens(answers, 12, 10).tolist() == list(range(10))
    assert columns_of(np.array([5, 7]), 9).tolist() == [-1] * 5 + [0, -1, 1, -1]


def test_some_answers_are_kept_to_score_on_and_short_ones_left_out() -> None:
    answers = [Answer([1, 2, 3, index], 1) for index in range(31)]
    answers[3] = Answer([1, 2], 1)
    to_fit, to_score = split_answers(answers)
    assert len(to_fit) == 28
    assert [answer.token_ids[3] for answer in to_score] == [14, 29]  # greedy and sampled ones


class Inventive:
    """A model that makes up a question of each number."""

    def __init__(self) -> None:
        self.num_made_up = 0

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(chat_template="any")

    def chat(self, chats: list[Any], params: list[Any], **_: Any) -> list[Any]:
        self.num_made_up += len(chats)
        texts = [f" Question {one.seed}? " for one in params]
        return [SimpleNamespace(outputs=[SimpleNamespace(text=text)]) for text in texts]


def test_requests_to_train_on_are_of_all_kinds_and_each_once() -> None:
    llm = Inventive()
    found = training_requests(llm, 300, seed=1)  # type: ignore[arg-type]
    assert len({request.content for request in found}) == len(found) == 300
    kinds = Counter(request.kind for request in found)
    assert min(kinds[kind] for kind in ("code", "json", "summaries")) > 20
    assert kinds["random"] == 0
    assert 120 <= llm.num_made_up < 180
    assert not any(request.content.startswith(" ") for request in found)


def test_answers_that_are_there_are_not_written_again(tmp_path: Path) -> None:
    """A line that was cut off is none; with answers enough no model is loaded."""
    file = tmp_path / "answers.jsonl"
    file.write_text("[[1, 2, 3], 1]\n[[4, 5, 6], 2]\n[[7,")
    found = write_answers("no such model", file, 2, questions=None, max_tokens=4, seed=0)
    assert found == [Answer([1, 2, 3], 1), Answer([4, 5, 6], 2)]


def test_the_head_sees_of_each_pass_what_it_sees_when_it_drafts(
    answers: list[Answer], layers: ModelStates
) -> None:
    """All anchors at once give what each gives alone: from its own text, pass by pass."""
    batch = [eagle3.example_of(layers, answer) for answer in answers[:2]]
    config = eagle3.head_config(layers, 256)
    torch.manual_seed(0)
    head, _ = eagle3.make_head(config, layers, np.arange(256), batch)
    with torch.inference_mode():
        torch.nn.init.normal_(head.down.weight, std=0.1)
        torch.nn.init.normal_(head.k.weight, std=0.1)
        together = [head.logits(state) for state in head.passes(batch, 3)]
        for anchor in (0, 7, 30):
            one = batch[1]
            end = one.first + anchor + 1
            cut = one._replace(
                states=one.states[:end], token_ids=one.token_ids[: end + 4], first=end - 1
            )
            alone = list(_drafted(head, cut))
            start = len(batch[0].states) - batch[0].first
            for number in range(3):
                torch.testing.assert_close(
                    together[number][start + anchor], alone[number], rtol=1e-3, atol=1e-3
                )


def _drafted(head: eagle3.Eagle3Head, one: eagle3.Example) -> Iterator[torch.Tensor]:
    """As an engine drafts: one text, in which the head's own states follow the model's."""
    count = len(one.states)
    state = head.joined(one.states[:, : len(head.scales)].float())
    for number in range(3):
        total = count + number
        rows = eagle3.Rows(state, [one.token_ids[: total + 1]], torch.arange(total),
                           torch.arange(total), [total], [0])  # fmt: skip
        seen = eagle3.Seen(rows, head.num_heads // head.num_kv_heads)
        found = head.layer(one.token_ids[1 : total + 1], state, rows.positions, seen)
        yield head.logits(found[-1])
        state = torch.cat([state, found[-1:]])


def test_states_of_each_layer_are_brought_to_one_size(
    answers: list[Answer], layers: ModelStates
) -> None:
    one = eagle3.example_of(layers, answers[0])
    large = one._replace(states=one.states * torch.tensor([1, 8, 64, 2]).repeat_interleave(64))
    before, after = eagle3.scales_of([one], 4), eagle3.scales_of([large], 4)
    expected = [scale / factor for scale, factor in zip(before, [1, 8, 64, 2], strict=True)]
    assert after == pytest.approx(expected, rel=1e-2)
    sizes = (one.states.float() * torch.tensor(before).repeat_interleave(64)).square()
    for part in sizes.chunk(4, dim=1):
        assert 0.5 < part.mean().sqrt() < 2


def accepted(
    model: TinyModel, folder: Path, method: str, heads: Path, answers: list[Answer]
) -> tuple[int, int]:
    """Tokens that were right, and tokens drafted, by an engine that loads the files."""
    speculation = json.dumps({"method": method, "model": str(heads), "num_speculative_tokens": 3})
    config = EngineConfig(device="cpu", max_model_len=160, speculative_config=speculation)
    values = ModelConfig.from_hf(model.config)
    backend = NativeBackend(
        values,
        model.checkpoint(),
        max_model_len=160,
        num_threads=1,
        heads=open_heads(config, values) if method == "medusa" else None,
        draft_head=open_draft_head(config, values, resolve_model(str(folder)))
        if method == "eagle3"
        else None,
    )
    engine = make_engine(backend, num_blocks=60, speculative_config=speculation)
    outputs = run(engine, WISHES, random.Random(1))
    stats = engine.stats()
    engine.close()
    for wish, answer in zip(WISHES, answers, strict=True):
        assert outputs[wish["request_id"]].tokens == answer.token_ids[3:]
    return stats.spec_accepted_tokens, stats.spec_draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [256, 100])
def test_trained_medusa_heads_draft_what_the_model_writes(
    num_tokens: int,
    model: TinyModel,
    answers: list[Answer],
    folder: Path,
    states: ModelStates,
    tmp_path: Path,
) -> None:
    """From states to files to the engine: most of what they draft is accepted."""
    token_ids = common_tokens(answers, num_tokens, 256)
    columns = np.append(columns_of(token_ids, 256), NO_TARGET)
    examples = medusa.examples_of(states, answers, 3)
    examples = examples._replace(targets=columns[examples.targets])
    heads = medusa.make_heads(3, states.output_rows(token_ids))
    before = medusa.score(heads, examples)
    medusa.fit(heads, examples, epochs=60, batch=64, rate=3e-3, seed=0)
    after = medusa.score(heads, examples)
    assert after.acceptance_length > 3 > before.acceptance_length + 0.5
    medusa.write_heads(tmp_path / "heads", heads, token_ids, 256)
    right, drafted = accepted(model, folder, "medusa", tmp_path / "heads", answers)
    assert right > 0.7 * drafted > 50


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [256, 100])
def test_a_trained_eagle3_head_drafts_what_the_model_writes(
    num_tokens: int,
    model: TinyModel,
    answers: list[Answer],
    folder: Path,
    layers: ModelStates,
    tmp_path: Path,
) -> None:
    """From states to files to the engine: most of what it drafts is accepted."""
    torch.manual_seed(0)
    token_ids = common_tokens(answers, num_tokens, 256)
    columns = columns_of(token_ids, 256)
    examples = [eagle3.example_of(layers, answer) for answer in answers]
    config = eagle3.head_config(layers, num_tokens)
    head, teacher = eagle3.make_head(config, layers, token_ids, examples)
    before = eagle3.score(head, examples, columns, 3)
    eagle3.write_head(tmp_path / "untrained", head, config, token_ids)
    eagle3.fit(head, teacher, examples, columns, depth=3, epochs=80, batch=2, rate=3e-3, seed=0)
    after = eagle3.score(head, examples, columns, 3)
    assert after.acceptance_length > 3 > before.acceptance_length + 0.5
    eagle3.write_head(tmp_path / "trained", head, config, token_ids)
    right, drafted = accepted(model, folder, "eagle3", tmp_path / "trained", answers)
    assert right > 0.7 * drafted > 50
    right, drafted = accepted(model, folder, "eagle3", tmp_path / "untrained", answers)
    assert right < 0.3 * drafted


def test_a_model_of_another_shape_is_refused(layers: ModelStates) -> None:
    layers.config = ModelConfig.from_hf(tiny_model("gemma2").config)
    with pytest.raises(SystemExit, match="not trained for Gemma2ForCausalLM; train medusa heads"):
        eagle3.head_config(layers, 100)
