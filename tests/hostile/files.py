"""The parsers of files: weights, tokenizers, configurations, templates, grammars, media, tiers."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any, Final

from tests.hostile.parser import HostileParser

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.hostile.parser import Read

    Opened = tuple[Read, Sequence[bytes], tuple[type[BaseException], ...]]


def _safetensors(folder: Path) -> Opened:
    from octavo_engine.errors import ModelError
    from octavo_engine.weights.safetensors import SafetensorsFile
    from tests.engine.weights.test_safetensors import VALID

    path = folder / "model.safetensors"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        file = SafetensorsFile(path)
        for name, entry in file.entries.items():
            assert len(file.data(name)) == entry.end - entry.begin

    return read, [VALID], (ModelError,)


def _gguf(folder: Path) -> Opened:
    from octavo_engine.errors import ModelError
    from octavo_engine.weights.gguf import GGUFFile
    from octavo_engine.weights.gguf_config import gguf_config, gguf_generation_config
    from tests.engine.weights.test_gguf import small_file

    path = folder / "model.gguf"
    seeds = [small_file(path).read_bytes(), _gguf_of_a_llama(path)]

    def read(data: bytes) -> None:
        path.write_bytes(data)
        file = GGUFFile(path)
        for tensor in file.tensors.values():
            assert len(file.data(tensor)) == tensor.end - tensor.begin
        gguf_config(file)
        gguf_generation_config(file)

    return read, seeds, (ModelError,)


def _gguf_part(folder: Path) -> Opened:
    from octavo_engine.errors import ModelError
    from octavo_engine.weights.gguf_parts import open_gguf
    from tests.engine.weights.test_gguf_parts import write_llama

    write_llama(folder / "m.gguf", max_tensors=2)
    paths = sorted(folder.glob("*.gguf"))

    def read(data: bytes) -> None:
        paths[1].write_bytes(data)
        file = open_gguf(paths[0])
        for tensor in file.tensors.values():
            assert len(file.data(tensor)) == tensor.end - tensor.begin

    return read, [path.read_bytes() for path in paths[1:3]], (ModelError,)


def _gguf_of_a_llama(path: Path) -> bytes:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(str(path), "llama")
    for name, value in (
        ("block_count", 2), ("embedding_length", 64), ("feed_forward_length", 128),
        ("context_length", 256), ("attention.head_count", 4), ("attention.head_count_kv", 2),
        ("rope.dimension_count", 16), ("vocab_size", 5),
    ):  # fmt: skip
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", "<s>", "</s>"])
    writer.add_token_types([1, 1, 1, 3, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(3)
    writer.add_eos_token_id(4)
    writer.add_tensor("token_embd.weight", np.zeros((5, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def _gguf_vocabulary(folder: Path) -> Opened:
    from octavo_engine.errors import InvalidRequest, ModelError
    from octavo_engine.tokenization.load import load_tokenizer
    from octavo_engine.weights.gguf import GGUFFile
    from octavo_engine.weights.source import ModelFiles

    path = folder / "model.gguf"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        files = ModelFiles(str(path), path, "gguf", {}, {}, GGUFFile(path))
        assert isinstance(load_tokenizer(files).encode("ab <s>"), list)

    return read, [_gguf_of_a_llama(path)], (ModelError, InvalidRequest)


def _tokenizer(name: str, seeds: Callable[[Path], Sequence[bytes]]) -> Callable[[Path], Opened]:
    def opened(folder: Path) -> Opened:
        from octavo_engine.errors import InvalidRequest, ModelError
        from octavo_engine.tokenization.load import load_tokenizer
        from octavo_engine.weights.source import ModelFiles

        found = seeds(folder)
        for path in folder.iterdir():
            path.unlink()
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
        files = ModelFiles(str(folder), folder, "safetensors", {"eos_token_id": 4}, {})

        def read(data: bytes) -> None:
            (folder / name).write_bytes(data)
            tokenizer = load_tokenizer(files)
            ids = tokenizer.encode("ab <s> é1")  # what it has no token for is a client's error
            assert isinstance(ids, list)
            tokenizer.decode(ids)

        return read, found, (ModelError, InvalidRequest)

    return opened


def _tokenizer_json(folder: Path) -> Sequence[bytes]:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    from tests.engine.tokenization.test_load import small_tokenizer

    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("ab", -2.0)], 0, False))
    unigram.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Prepend("_")])
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    pieces.pre_tokenizer = pre_tokenizers.Whitespace()
    return [one.to_str().encode() for one in (small_tokenizer(), unigram, pieces)]


def _sentencepiece(folder: Path) -> Sequence[bytes]:
    from tests.engine.tokenization.test_sentencepiece import FORMS, trained

    return [trained(name) for name in sorted(FORMS)[:3]]


def _configs() -> list[dict[str, Any]]:
    from tests.engine.models.test_config import LLAMA, LLAMA3_ROPE
    from tests.engine.models.test_published import PUBLISHED

    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return [
        LLAMA, {**LLAMA, "rope_scaling": LLAMA3_ROPE, "quantization_config": quantized},
        *(fields for fields, _ in PUBLISHED.values()),
    ]  # fmt: skip


def _config(folder: Path) -> Opened:
    from octavo_engine.errors import ModelError
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.models.pooling_config import read_pooling
    from octavo_engine.weights.json_file import read_json_object
    from octavo_engine.weights.quantized import layout_of

    path = folder / "config.json"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        fields = read_json_object(path)
        config = ModelConfig.from_hf(fields)
        assert config.caches()
        read_pooling(fields, None)
        if fields.get("quantization_config") is not None:
            layout_of(fields["quantization_config"])

    return read, [json.dumps(one).encode() for one in _configs()], (ModelError,)


def _adapter(folder: Path) -> Opened:
    from octavo_engine.errors import ModelError
    from octavo_engine.weights.adapter import read_adapter
    from tests.fakes.adapters import write_adapter

    write_adapter(folder, {"model.layers.0.self_attn.q_proj": (16, 8)}, rank=4)
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    valid = config.read_bytes(), weights.read_bytes()

    def read(data: bytes) -> None:
        is_config = data[:1] == b"{"
        config.write_bytes(data if is_config else valid[0])
        weights.unlink()  # threads may still hash the last one, which stays whole for them
        weights.write_bytes(valid[1] if is_config else data)
        read_adapter(str(folder))

    return read, valid, (ModelError,)


_CHATML: Final = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] +"
    " '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TOOLS: Final = (
    "{%- macro show(x, depth=0) -%}{{ x | tojson }}{%- endmacro -%}{%- set ns = namespace(n=0) -%}"
    "{%- for m in messages -%}{%- set ns.n = ns.n + 1 -%}{%- if m.content is string -%}"
    "{{ m.content | trim | upper }}{%- else -%}{%- for p in m.content if p.type == 'text' -%}"
    "{{ p.text[:9] }}{%- endfor -%}{%- endif -%}{%- endfor -%}{%- if tools -%}{{ show(tools) }}"
    "{%- endif -%}{{ strftime_now('%Y') }}{{ raise_exception('no') if ns.n > 99 }}"
    "{{ range(3) | list | join(',') }}{{ 'a' * 3 }}{{ bos_token }}{{ messages | length ** 2 }}"
)
_CHAT: Final[list[dict[str, Any]]] = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]


def _template(folder: Path) -> Opened:
    from octavo_engine.errors import InvalidRequest, ModelError
    from octavo_engine.tokenization.chat_template import ChatTemplate

    def read(data: bytes) -> None:
        template = ChatTemplate(
            data.decode("utf-8", "replace"), special_tokens={"bos_token": "<s>"}
        )
        assert isinstance(template.render(_CHAT, tools=[{"type": "function"}]), str)

    return read, [_CHATML.encode(), _TOOLS.encode()], (ModelError, InvalidRequest)


_SCHEMAS: Final[tuple[dict[str, Any], ...]] = (
    {
        "type": "object", "required": ["a"], "additionalProperties": False,
        "properties": {
            "a": {"type": "string", "pattern": "^a{1,9}b?$", "maxLength": 20},
            "b": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1, "maxItems": 4},
            "c": {"enum": ["x", 1, None]}, "d": {"anyOf": [{"type": "null"}, {"const": 2.5}]},
        },
        "$defs": {"n": {"type": "integer", "minimum": -5, "exclusiveMaximum": 10**6}},
    },
    {"oneOf": [{"type": "number", "multipleOf": 0.5}, {"type": "string", "format": "date-time"}]},
)  # fmt: skip
_GRAMMARS: Final = (
    "schema\n{}", "regex\n(yes|no) [a-z]{2,9}(?:x|y)*\\d+$", 'ebnf\nroot ::= "((" root "))" | "x"',
    'ebnf\nstart: item ("," item)*\nitem: /[a-z]+/ | "(" start ")"\n', 'choice\n["a", "b c"]',
    'tag\n{"type":"structural_tag","format":{"type":"triggered_tags","triggers":["<f"],"tags":'
    '[{"begin":"<f>","content":{"type":"json_schema","json_schema":{}},"end":"</f>"}]}}',
)  # fmt: skip


def _grammar(folder: Path) -> Opened:
    from octavo_engine.errors import InvalidRequest
    from octavo_engine.grammar import normal
    from octavo_engine.grammar.check import check

    kinds: dict[str, Callable[[str], Any]] = {
        "schema": normal.json_schema_spec, "regex": normal.regex_spec,
        "tag": normal.structural_tag_spec, "ebnf": normal.grammar_spec,
        "choice": lambda text: normal.choice_spec(text.split(",")),
    }  # fmt: skip

    def read(data: bytes) -> None:
        kind, _, text = data.decode("utf-8", "replace").partition("\n")
        check(kinds.get(kind, kinds["schema"])(text))

    seeds = [f"schema\n{json.dumps(one)}".encode() for one in _SCHEMAS]
    return read, [*seeds, *(text.encode() for text in _GRAMMARS)], (InvalidRequest,)


def _schema(folder: Path) -> Opened:
    from octavo_engine.errors import InvalidRequest
    from octavo_engine.grammar import normal
    from octavo_engine.grammar.check import check

    def read(data: bytes) -> None:
        check(normal.json_schema_spec(data.decode("utf-8", "replace")))

    return read, [json.dumps(one).encode() for one in _SCHEMAS], (InvalidRequest,)


def _picture(folder: Path) -> Opened:
    import numpy as np
    from PIL import Image

    from octavo_engine.core.media.prepare import FORMATS, prepare
    from octavo_engine.core.media.spec import (
        CropToTile,
        FillTiles,
        FitPixels,
        PadToTiles,
        PictureSpec,
        SplitIntoTiles,
    )
    from octavo_engine.models.vision_config import read_media_config

    media = read_media_config(
        {
            "architectures": ["Idefics3ForConditionalGeneration"],
            "image_token_id": 5,
            "vision_config": {"image_size": 42, "patch_size": 7, "hidden_size": 48},
        }
    )
    assert media is not None
    shapes = (
        CropToTile(42), SplitIntoTiles(126, (126, 126), True), FillTiles(1, 6),
        PadToTiles(((1, 2), (2, 2), (3, 1))), FitPixels(14, 784, 1764),
    )  # fmt: skip
    specs = [
        PictureSpec(
            media=media, shape=shape, size=(42, 42), resample=3, scale=1 / 255,
            mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5),
        )
        for shape in shapes
    ]  # fmt: skip
    pixels = np.random.default_rng(1).integers(0, 256, (50, 70, 3), np.uint8)
    seeds = []
    for form in FORMATS:
        for mode in ("RGB", "P"):
            file = io.BytesIO()
            Image.fromarray(pixels).convert("RGB" if form == "JPEG" else mode).save(file, form)
            seeds.append(file.getvalue())

    def read(data: bytes) -> bool:
        results = [prepare(data, spec) for spec in specs]
        assert all((result.picture is None) == bool(result.problem) for result in results)
        return results[0].picture is not None

    return read, seeds, ()


def _wav(folder: Path) -> Opened:
    from octavo_engine.errors import InvalidRequest
    from octavo_engine.speech.decode import AudioLimits, decode_audio
    from octavo_engine.speech.wav import is_wav
    from tests.engine.speech.test_decode import tone, wav

    limits = AudioLimits(max_seconds=60.0)

    def read(data: bytes) -> bool:
        if not is_wav(data):
            return False  # goes to a process of its own; see the parser named audio
        assert decode_audio(data, limits).size
        return True

    sound = tone(8000, 0.05)
    forms = [(1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64)]
    seeds = [wav(sound, 8000, kind=kind, bits=bits) for kind, bits in forms]
    return read, seeds, (InvalidRequest,)


def _audio(folder: Path) -> Opened:
    """Each in a process of its own, as the server decodes it: slow, and a crash there is a 400."""
    from octavo_engine.errors import InvalidRequest
    from octavo_engine.speech.decode import AudioLimits, decode_audio
    from tests.engine.speech.test_decode import encoded

    limits = AudioLimits(max_seconds=60.0, decode_timeout_s=10.0)
    seeds = [encoded(*form) for form in (("mp3", "mp3"), ("flac", "flac"), ("ogg", "libopus"))]
    return lambda data: decode_audio(data, limits), seeds, (InvalidRequest,)


def _decoder(folder: Path) -> Opened:
    """What runs in that process, without starting one for each: hundreds of times as many."""
    import av

    from octavo_engine.speech import decode_process
    from tests.engine.speech.test_decode import encoded

    forms = (("mp3", "mp3"), ("flac", "flac"), ("ogg", "libopus"), ("webm", "libopus"),
             ("mp4", "aac"), ("adts", "aac"))  # fmt: skip
    seeds = [encoded(*form) for form in forms]
    av.logging.set_level(av.logging.PANIC)

    def read(data: bytes) -> bool:
        with redirect_stdout(io.TextIOWrapper(io.BytesIO())), redirect_stderr(io.StringIO()):
            return decode_process._decode(data, 60 * 16_000) == 0

    return read, seeds, (av.error.FFmpegError, ValueError, EOFError, MemoryError)


def _tier_file(folder: Path) -> Opened:
    import numpy as np

    from octavo_engine.caches import STATE_GROUP
    from octavo_engine.tiers.page import NAME_BYTES, PageSizes, block_name
    from octavo_engine.tiers.run_folder import LocalFolder
    from octavo_engine.tiers.run_format import (
        KEY_BYTES,
        TierFileError,
        read_header,
        read_page,
        write_run,
    )

    key, sizes = bytes(KEY_BYTES), PageSizes(256, state=640)
    runs = LocalFolder(folder, key)
    path = folder / key.hex() / "run"
    names = [bytes([i]) * NAME_BYTES for i in range(3)]
    states = [block_name(name[:-1], STATE_GROUP) for name in names]

    def file_of(names: list[bytes]) -> bytes:
        file = io.BytesIO()
        write_run(file, key, names, [np.full(sizes.of(n), n[0], np.uint8) for n in names])
        return file.getvalue()

    def read(data: bytes) -> None:
        path.write_bytes(data)
        with runs.open(path.name) as opened:
            page_bytes, places, _ = read_header(opened, key, sizes)
            assert page_bytes in sizes
            for place in places.values():
                assert read_page(opened, place, page_bytes).nbytes == page_bytes

    return read, [file_of(names), file_of(states)], (TierFileError,)


def _resource(folder: Path) -> Opened:
    from octavo_operator.desired import desired_objects
    from octavo_operator.errors import SpecInvalid
    from octavo_operator.spec import LLMDeployment
    from tests.fakes.deployments import make_body, with_images
    from tests.fakes.random_specs import GOOD, leaves, spec_schema

    schema = spec_schema()
    bodies = [make_body()]
    for path in leaves(schema):
        value: Any = next((GOOD[part][0] for part in reversed(path) if part in GOOD), 1)
        for part in reversed(path):
            value = [value] if part == "[]" else {"key" if part == "{}" else part: value}
        bodies.append(make_body(value))
    images = with_images()

    def read(data: bytes) -> None:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return  # the API server's own parser refuses it
        assert desired_objects(LLMDeployment.parse(value), images)

    return read, [json.dumps(body).encode() for body in bodies], (SpecInvalid,)


FILES: Final[dict[str, HostileParser]] = {
    "safetensors": HostileParser(
        open=_safetensors, words=(b"data_offsets", b"BF16", b"__metadata__")
    ),
    "gguf": HostileParser(open=_gguf, words=(b"llama.", b"GGUF")),
    "gguf part": HostileParser(open=_gguf_part, words=(b"split.", b"GGUF")),
    "gguf vocabulary": HostileParser(open=_gguf_vocabulary, words=(b"tokenizer.ggml.", b"<s>")),
    "tokenizer.json": HostileParser(
        open=_tokenizer("tokenizer.json", _tokenizer_json), json_share=0.7
    ),
    "tokenizer.model": HostileParser(open=_tokenizer("tokenizer.model", _sentencepiece)),
    "config.json": HostileParser(open=_config, json_share=0.8),
    "adapter": HostileParser(open=_adapter, json_share=0.5),
    "template": HostileParser(
        open=_template,
        words=(
            b"{%",
            b"%}",
            b"{{",
            b"}}",
            b"__class__",
            b"|join",
            b" for ",
            b"range(9**9)",
            b"*99",
        ),
    ),
    "grammar": HostileParser(open=_grammar, words=(b"(", b")*", b"{1,999}", b"|", b"root", b"::=")),
    "JSON schema": HostileParser(open=_schema, json_share=0.9, words=(b"$ref", b"#/$defs/n")),
    "picture": HostileParser(open=_picture, growth_mib=128, peak_mib=700),
    "WAV": HostileParser(open=_wav, words=(b"data", b"fmt "), peak_mib=512),
    "audio": HostileParser(open=_audio, growth_mib=128, peak_mib=512),
    "encoded sound": HostileParser(
        open=_decoder, words=(b"OggS", b"fLaC", b"ID3", b"moov", b"#EXTM3U"), growth_mib=128
    ),
    "KV tier file": HostileParser(open=_tier_file),
    "LLMDeployment": HostileParser(open=_resource, json_share=0.95),
}
