"""A small model that sees, made on this machine's CPU: SmolLM2 with a tower of its own.

    python -m benchmarks.vision_model train FOLDER      (needs torch, transformers, pillow)
    python -m benchmarks.vision_model ask FOLDER
    python -m benchmarks.vision_model measure FOLDER

`train` draws pictures of shapes and digits and trains a SigLIP tower to describe them: each line
of a picture's 5 x 5 patches says what a quarter shows ("The square is red."), a patch a word. It
then fits a projector, with the tower as it is, from there to SmolLM2's own embeddings of these
words, and writes FOLDER as a checkpoint in LLaVA 1.5's form:

    octavo serve FOLDER

The language model stays as it is. `ask` puts questions about pictures that were not trained on, and
prints how many answers are right. `measure` prints the time to the first token of a picture that
is new, of one that was seen before, and of a text of as many tokens.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from benchmarks.peers.models import write_safetensors
from benchmarks.servers import Server, free_port, streamed_chat
from benchmarks.vision_pictures import (
    DIGITS,
    NAMES,
    NOTHING,
    SHAPES,
    Question,
    Scene,
    questions,
    render,
    scenes,
    sentences,
)
from octavo_engine.tokenization.gguf_vocabulary import gguf_tokenizer
from octavo_engine.weights.source import resolve_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tokenizers import Tokenizer
    from torch import Tensor

SOURCE = "demo://smollm2"
SIDE, PATCH = 40, 8  # pixels
LINES = SIDE // PATCH  # of patches; the last one describes no quarter
WIDTH, LAYERS, HEADS = 96, 3, 3  # of the tower
PLACEHOLDER = "<image>"
BATCH, RATE = 32, 2e-3
RIDGE = 1e-4  # of the projector's least squares
CONSTANT = 0.1  # weight of words that are the same in each sentence
UNSEEN = 1_000_003  # seed of pictures to ask about
WORDS = tuple(dict.fromkeys((*NOTHING, "digit", *SHAPES, *NAMES, *DIGITS)))
# SmolLM2's own, with pictures before the text and no system message of its own.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] }}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


# -- pictures as numbers --------------------------------------------------------------------------


class Pictures(NamedTuple):
    pixels: Tensor  # [N, SIDE, SIDE, 3] of bytes
    words: Tensor  # [N, 4, 5], by their place in WORDS


def draw(some: Iterable[Scene]) -> Pictures:
    """Resized as the server does it."""
    import torch

    pixels, words = [], []
    for scene in some:
        small = render(scene).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        pixels.append(np.asarray(small))
        words.append([[WORDS.index(word) for word in said] for said in sentences(scene)])
    return Pictures(torch.from_numpy(np.stack(pixels)), torch.tensor(words))


def mixed(pictures: Pictures, count: int) -> Pictures:
    """Pictures of which each quarter is, with equal chances, its own or one of another picture: so
    a few thousand are enough."""
    import torch

    half = SIDE // 2
    # Quarters in lines: [N, 4, half, half, 3]
    by_quarter = pictures.pixels.view(-1, 2, half, 2, half, 3).transpose(2, 3).flatten(1, 2)
    base = torch.randint(len(by_quarter), (count, 1)).expand(-1, 4)
    is_own = torch.rand(count, 4) < 0.5
    source = torch.where(is_own, base, torch.randint(len(by_quarter), (count, 4)))
    quarter = torch.where(is_own, torch.arange(4), torch.randint(4, (count, 4)))
    chosen = by_quarter[source, quarter].view(count, 2, 2, half, half, 3)
    pixels = chosen.transpose(2, 3).reshape(count, SIDE, SIDE, 3)
    return Pictures(pixels, pictures.words[source, quarter])


# -- training -------------------------------------------------------------------------------------


class Encoder:
    """A tower and a projector, in transformers' own modules."""

    def __init__(self, text_size: int) -> None:
        import torch
        from transformers import SiglipVisionConfig, SiglipVisionModel
        from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

        self.config: dict[str, Any] = {
            "model_type": "siglip_vision_model", "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS, "image_size": SIDE, "patch_size": PATCH,
            "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "vision_use_head": False,
        }  # fmt: skip
        self.tower = SiglipVisionModel(SiglipVisionConfig(**self.config))
        self.projector = LlavaMultiModalProjector(llava_config(self.config, text_size))
        self.words = torch.nn.Linear(WIDTH, len(WORDS))  # of use in training only

    def hidden(self, pixels: Tensor) -> Tensor:
        """Of each patch what the projector reads: [N, 25, WIDTH]."""
        values = (pixels.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
        states: Tensor = self.tower(values, output_hidden_states=True).hidden_states[-1]
        return states

    def rows(self, pixels: Tensor) -> Tensor:
        """Of each patch one, as the language model reads it: [N * 25, columns]."""
        rows: Tensor = self.projector(self.hidden(pixels))
        return rows.flatten(0, 1)

    def tensors(self) -> dict[str, Tensor]:
        """Under the names that LLaVA's checkpoints have."""
        parts = {"model.vision_tower.": self.tower, "model.multi_modal_projector.": self.projector}
        return {
            prefix + name: tensor
            for prefix, module in parts.items()
            for name, tensor in module.state_dict().items()
        }


def llava_config(vision: dict[str, Any], text_size: int) -> Any:
    from transformers import LlavaConfig, SiglipVisionConfig

    return LlavaConfig(
        vision_config=SiglipVisionConfig(**vision),
        text_config={"model_type": "llama", "hidden_size": text_size},
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )


def targets(words: Tensor) -> Tensor:
    """The word that each row is to be, by its place in WORDS: [N * 25]."""
    import torch

    last = torch.tensor([WORDS.index(word) for word in NOTHING]).expand(len(words), 1, -1)
    return torch.cat([words, last], dim=1).flatten()


def fit_tower(encoder: Encoder, pictures: Pictures, *, steps: int) -> None:
    """From what it makes of each patch, a linear layer is to tell the word."""
    import torch
    from torch.nn import functional

    sentence = [CONSTANT, 1.0, CONSTANT, 1.0, CONSTANT]
    weights = torch.tensor(sentence * (LINES - 1) + [CONSTANT] * LINES)
    learnt = [*encoder.tower.parameters(), *encoder.words.parameters()]
    optimizer = torch.optim.AdamW(learnt, lr=RATE, weight_decay=0.02, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=steps + 1, pct_start=0.1
    )
    started, losses = time.perf_counter(), []
    for step in range(1, steps + 1):
        batch = mixed(pictures, BATCH)
        logits = encoder.words(encoder.hidden(batch.pixels)).flatten(0, 1)
        wrong = functional.cross_entropy(logits, targets(batch.words), reduction="none")
        loss = (wrong.view(BATCH, -1) * weights).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if step % 100 == 0 or step == steps:
            recent = losses[-100:]
            say(f"step {step} of {steps}: loss {sum(recent) / len(recent):.3f}, "
                f"{time.perf_counter() - started:.0f} s")  # fmt: skip


def fit_projector(encoder: Encoder, pictures: Pictures, embeddings: Tensor) -> None:
    """Rows are to be the embeddings of their words; the tower stays as it is. The first layer is
    drawn, to features of all kinds, and the second is the least squares' solution."""
    import torch
    from torch.nn import functional

    first, second = encoder.projector.linear_1, encoder.projector.linear_2
    batches = [mixed(pictures, 100) for _ in range(12)]
    with torch.no_grad():
        hidden = torch.cat([encoder.hidden(batch.pixels).flatten(0, 1) for batch in batches])
        wanted = embeddings[torch.cat([targets(batch.words) for batch in batches])]
        weight = torch.randn_like(first.weight) / (hidden.std() * WIDTH**0.5)
        first.weight.copy_(weight)
        first.bias.copy_(0.5 * torch.randn_like(first.bias) - weight @ hidden.mean(0))
        features = functional.gelu(first(hidden))
        features = torch.cat([features, torch.ones(len(features), 1)], dim=1)
        products = features.T @ features
        ridge = RIDGE * products.diagonal().mean() * torch.eye(len(products))
        solution = torch.linalg.solve(products + ridge, features.T @ wanted)
        second.weight.copy_(solution[:-1].T)
        second.bias.copy_(solution[-1])


def right_rows(encoder: Encoder, pictures: Pictures, embeddings: Tensor) -> float:
    """How many of the rows that say what a quarter shows are nearest to their word."""
    import torch

    with torch.inference_mode():
        nearest = torch.cdist(encoder.rows(pictures.pixels), embeddings).argmin(1)
    is_right = (nearest == targets(pictures.words)).view(-1, LINES, LINES)
    shows = pictures.words[:, :, 1] != WORDS.index(NOTHING[1])
    return float(is_right[:, :-1][shows].float().mean())


# -- the checkpoint -------------------------------------------------------------------------------


class LanguageModel(NamedTuple):
    """SmolLM2, from the files of its package."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    tokenizer: Tokenizer

    def embeddings(self, words: Iterable[str]) -> Tensor:
        """Of words behind a space; of signs and digits as they are."""
        ids = []
        for word in words:
            text = f" {word}" if word.isalpha() else word
            (token,) = self.tokenizer.encode(text, add_special_tokens=False).ids
            ids.append(token)
        return self.tensors["model.embed_tokens.weight"][ids].float()


def read_language_model() -> LanguageModel:
    from safetensors.torch import load_file

    files = resolve_model(SOURCE)
    assert files.gguf is not None  # the demo is one
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        write_safetensors(files.gguf, path)
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    return LanguageModel(files.config, tensors, gguf_tokenizer(files.gguf.metadata, SOURCE))


def write_checkpoint(folder: Path, language: LanguageModel, encoder: Encoder) -> None:
    """As LLaVA 1.5's are published. config.json comes last: it says that all is there."""
    import torch
    from safetensors.torch import save_file

    text = {k: v for k, v in language.config.items() if k != "architectures"}
    embeddings = language.tensors["model.embed_tokens.weight"]
    placeholder = len(embeddings)
    more = embeddings.new_zeros(-(-(placeholder + 1) // 16) * 16 - placeholder, len(embeddings[0]))
    own = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in language.tensors.items()
    }
    # One row for the placeholder, and as many as fill a panel.
    own["model.language_model.embed_tokens.weight"] = torch.cat([embeddings, more])
    tensors = own | {name: tensor.bfloat16() for name, tensor in encoder.tensors().items()}
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "dtype": "bfloat16",
        "image_token_index": placeholder,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "image_seq_length": LINES**2,
        "tie_word_embeddings": True,
        "text_config": text | {"vocab_size": len(embeddings) + len(more)},
        "vision_config": encoder.config,
    }
    preprocessor = {
        "image_processor_type": "SiglipImageProcessor",
        "do_resize": True, "size": {"height": SIDE, "width": SIDE},
        "resample": int(Image.Resampling.BICUBIC), "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE,
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>", "model_max_length": text["max_position_embeddings"],
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    language.tokenizer.add_special_tokens([PLACEHOLDER])
    language.tokenizer.save(str(folder / "tokenizer.json"))
    for name, value in (
        ("preprocessor_config.json", preprocessor),
        ("tokenizer_config.json", tokenizer),
        ("generation_config.json", {"eos_token_id": text["eos_token_id"]}),
        ("config.json", config),
    ):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def train(folder: Path, *, pictures: int, steps: int, seed: int) -> float:
    """Returns how many rows of pictures that were not trained on are right."""
    import torch

    torch.manual_seed(seed)
    language = read_language_model()
    embeddings = language.embeddings(WORDS)
    started = time.perf_counter()
    seen = draw(islice(scenes(seed), pictures))
    say(f"{pictures} pictures, {time.perf_counter() - started:.0f} s")
    encoder = Encoder(embeddings.shape[1])
    fit_tower(encoder, seen, steps=steps)
    fit_projector(encoder, seen, embeddings)
    right = right_rows(encoder, draw(islice(scenes(UNSEEN), 200)), embeddings)
    say(f"{right:.1%} of the rows are right for pictures that were not trained on")
    write_checkpoint(folder, language, encoder)
    say(f"{folder} is written: octavo serve {folder}")
    return right


# -- questions ------------------------------------------------------------------------------------


class PictureQuestion(NamedTuple):
    picture: Image.Image
    question: Question


def unseen(count: int, *, kind: str = "") -> list[PictureQuestion]:
    """Questions about pictures that no training had; those that begin with `kind`."""
    found: Iterator[PictureQuestion] = (
        PictureQuestion(render(scene), question)
        for scene in scenes(UNSEEN)
        for question in questions(scene)
        if question.text.startswith(kind)
    )
    return list(islice(found, count))


def ask(folder: Path, *, count: int) -> dict[str, float]:
    """How many answers are right, by kind of question."""
    from octavo import LLM, SamplingParams

    about_pictures = unseen(count)
    chats: list[Any] = [
        [{"role": "user", "content": [
            {"type": "image_pil", "image_pil": each.picture},
            {"type": "text", "text": each.question.text},
        ]}]
        for each in about_pictures
    ]  # fmt: skip
    with LLM(str(folder), max_model_len=512) as llm:
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    right = defaultdict(list)
    for each, output in zip(about_pictures, outputs, strict=True):
        kind = " ".join(each.question.text.split()[:2])
        right[kind].append(is_right(each.question, output.outputs[0].text))
    for kind, all_of_kind in right.items():
        say(f"{kind} …: {sum(all_of_kind)} of {len(all_of_kind)} right")
    say(
        f"Chance is 1 in {len(NAMES)} for a colour, in {len(SHAPES)} for a shape, in 10 for a digit"
    )
    return {kind: sum(found) / len(found) for kind, found in right.items()}


def is_right(question: Question, said: str) -> bool:
    """The first of the words that could be an answer is the right one."""
    family = next(words for words in (NAMES, SHAPES, DIGITS) if question.answer in words)
    mentioned = question.text.lower().rstrip("?").split()
    for word in said.lower().replace(".", " ").replace(",", " ").split():
        if word in family and word not in mentioned:
            return word == question.answer
    return False


# -- times ----------------------------------------------------------------------------------------


class Times(NamedTuple):
    """Milliseconds to the first token, medians, of prompts of equally many tokens."""

    new: float  # a picture that the server has not seen
    repeated: float  # a picture that it has, and another question
    text: float  # words in the picture's place that it has seen, and another question


def measure(folder: Path, *, rounds: int) -> Times:
    command = [sys.executable, "-m", "octavo.cli", "serve", str(folder), "--port"]
    port = free_port()
    rows: list[tuple[float, float, float]] = []
    with (
        tempfile.TemporaryDirectory() as logs,
        Server.start([*command, str(port)], port=port, log=Path(logs) / "log"),
    ):
        # As many tokens as the picture's rows and the newline behind them.
        words = " square" * LINES**2 + "\n"
        for number, scene in enumerate(islice(scenes(UNSEEN), rounds + 1)):
            picture = {"type": "image_url", "image_url": {"url": data_url(render(scene))}}
            first, second = (f"{number}, {which} question: what is it?" for which in ("one", "two"))
            new = first_token_s(port, [picture, text_part(first)])
            repeated = first_token_s(port, [picture, text_part(second)])
            first_token_s(port, [text_part(words + first)])
            text = first_token_s(port, [text_part(words + second)])
            if number:  # the first round starts the processes that decode pictures
                rows.append((new, repeated, text))
    times = Times(*(1e3 * statistics.median(each) for each in zip(*rows, strict=True)))
    say(f"first token after {times.new:.1f} ms for a new picture, {times.repeated:.1f} ms for one "
        f"that comes again, {times.text:.1f} ms for text of as many tokens: "
        f"{times.repeated / times.text:.2f} x")  # fmt: skip
    return times


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def data_url(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def first_token_s(port: int, content: list[Any]) -> float:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    started = time.perf_counter()
    with streamed_chat(port, body) as lines:
        for line in lines:
            if b'"content":"' in line and b'"content":""' not in line:
                break
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("train", "ask", "measure"):
        commands.add_parser(name).add_argument("folder", type=Path)
    training = commands.choices["train"]
    training.add_argument("--pictures", type=int, default=3000, help="that are drawn (3000)")
    training.add_argument("--steps", type=int, default=3000, help=f"of {BATCH} pictures (3000)")
    training.add_argument("--seed", type=int, default=0, help="of pictures and first weights (0)")
    training.add_argument("--threads", type=int, default=None, help="of torch (one a core)")
    commands.choices["ask"].add_argument("--count", type=int, default=200, help="questions (200)")
    commands.choices["measure"].add_argument("--rounds", type=int, default=20, help="(20)")
    args = parser.parse_args()
    if args.command == "train":
        if min(args.pictures, args.steps, args.threads or 1) < 1:
            parser.error("--pictures, --steps and --threads must be at least 1")
        if args.seed == UNSEEN:
            parser.error(f"--seed must not be {UNSEEN}: those pictures are for `ask`")
        if args.threads is not None:
            import torch

            torch.set_num_threads(args.threads)
        train(args.folder, pictures=args.pictures, steps=args.steps, seed=args.seed)
    elif args.command == "ask":
        ask(args.folder, count=args.count)
    else:
        measure(args.folder, rounds=args.rounds)


if __name__ == "__main__":
    main()
