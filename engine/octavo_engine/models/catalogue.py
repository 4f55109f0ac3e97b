"""The supported families as people know them, and docs/models.md, which is made of that and of the
tables of architectures."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.models.encoder_config import known_encoders
from octavo_engine.models.families import FAMILIES
from octavo_engine.weights.gguf_names import ARCHITECTURES

if TYPE_CHECKING:
    from collections.abc import Iterator


class FamilyEntry(NamedTuple):
    """One family: its classes in config.json, and a checkpoint of it."""

    name: str
    architectures: tuple[str, ...]
    example: str
    # transformers' class that computes the same, where it has none of the family's own.
    tested_as: str = ""
    limits: str = ""


_RECURRENT = "no tensor parallelism: [recurrent states](recurrent.md)"

CATALOGUE = (
    FamilyEntry("Arcee", ("ArceeForCausalLM",), "arcee-ai/AFM-4.5B"),
    FamilyEntry(
        "Baichuan 1, 2",
        ("BaichuanForCausalLM", "BaiChuanForCausalLM"),
        "baichuan-inc/Baichuan2-7B-Chat",
        "Llama",
    ),
    FamilyEntry("Bamba", ("BambaForCausalLM",), "ibm-ai-platform/Bamba-9B-v2", limits=_RECURRENT),
    FamilyEntry("BLOOM", ("BloomForCausalLM",), "bigscience/bloom-560m"),
    FamilyEntry("Command-R, Command-R+", ("CohereForCausalLM",), "CohereLabs/c4ai-command-r-v01"),
    FamilyEntry(
        "Command-R7B, Command A", ("Cohere2ForCausalLM",), "CohereLabs/c4ai-command-r7b-12-2024"
    ),
    FamilyEntry("CWM", ("CwmForCausalLM",), "facebook/cwm"),
    FamilyEntry("DBRX", ("DbrxForCausalLM",), "databricks/dbrx-instruct"),
    FamilyEntry(
        "DeepSeek V2, V2-Lite",
        ("DeepseekV2ForCausalLM",),
        "deepseek-ai/DeepSeek-V2-Lite-Chat",
    ),
    FamilyEntry(
        "DeepSeek V3, R1, Kimi K2, Moonlight",
        ("DeepseekV3ForCausalLM",),
        "moonshotai/Moonlight-16B-A3B-Instruct",
    ),
    FamilyEntry("dots.llm1", ("Dots1ForCausalLM",), "rednote-hilab/dots.llm1.inst"),
    FamilyEntry("ERNIE 4.5 (dense)", ("Ernie4_5ForCausalLM",), "baidu/ERNIE-4.5-0.3B-PT"),
    FamilyEntry(
        "EXAONE 3, 3.5", ("ExaoneForCausalLM",), "LGAI-EXAONE/EXAONE-3.5-2.4B-Instruct", "Llama"
    ),
    FamilyEntry("EXAONE 4", ("Exaone4ForCausalLM",), "LGAI-EXAONE/EXAONE-4.0-1.2B"),
    FamilyEntry(
        "Falcon",
        ("FalconForCausalLM",),
        "tiiuae/falcon-7b",
    ),
    FamilyEntry(
        "Falcon-H1", ("FalconH1ForCausalLM",), "tiiuae/Falcon-H1-0.5B-Instruct", limits=_RECURRENT
    ),
    FamilyEntry(
        "FalconMamba",
        ("FalconMambaForCausalLM",),
        "tiiuae/falcon-mamba-7b-instruct",
        limits=_RECURRENT,
    ),
    FamilyEntry("FlexOlmo", ("FlexOlmoForCausalLM",), "allenai/FlexOlmo-7x7B-1T"),
    FamilyEntry("Gemma 1", ("GemmaForCausalLM",), "google/gemma-2b-it"),
    FamilyEntry("Gemma 2", ("Gemma2ForCausalLM",), "google/gemma-2-2b-it"),
    FamilyEntry(
        "Gemma 3",
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        "google/gemma-3-1b-it",
    ),
    FamilyEntry(
        "Gemma 3n (text)",
        ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
        "google/gemma-3n-E2B-it",
        limits="CPU only, in one process",
    ),
    FamilyEntry("GLM-4", ("GlmForCausalLM",), "zai-org/glm-4-9b-chat-hf"),
    FamilyEntry("GLM-4-0414", ("Glm4ForCausalLM",), "zai-org/GLM-4-9B-0414"),
    FamilyEntry("GLM-4.5, 4.6", ("Glm4MoeForCausalLM",), "zai-org/GLM-4.5-Air"),
    FamilyEntry("GLM-4.7-Flash", ("Glm4MoeLiteForCausalLM",), "zai-org/GLM-4.7-Flash"),
    FamilyEntry("GPT-2", ("GPT2LMHeadModel",), "openai-community/gpt2"),
    FamilyEntry(
        "GPT-BigCode (SantaCoder, StarCoder)", ("GPTBigCodeForCausalLM",), "bigcode/starcoder"
    ),
    FamilyEntry("gpt-oss", ("GptOssForCausalLM",), "openai/gpt-oss-20b"),
    FamilyEntry("GPT-J", ("GPTJForCausalLM",), "EleutherAI/gpt-j-6b"),
    FamilyEntry("GPT-NeoX, Pythia", ("GPTNeoXForCausalLM",), "EleutherAI/pythia-1b"),
    FamilyEntry("Granite 3", ("GraniteForCausalLM",), "ibm-granite/granite-3.3-2b-instruct"),
    FamilyEntry(
        "Granite 3 MoE", ("GraniteMoeForCausalLM",), "ibm-granite/granite-3.1-1b-a400m-instruct"
    ),
    FamilyEntry(
        "Granite 4",
        ("GraniteMoeHybridForCausalLM",),
        "ibm-granite/granite-4.0-h-350m",
        limits=_RECURRENT,
    ),
    FamilyEntry("Helium", ("HeliumForCausalLM",), "kyutai/helium-1-2b"),
    FamilyEntry(
        "Hunyuan (dense)",
        ("HunYuanDenseV1ForCausalLM",),
        "tencent/Hunyuan-1.8B-Instruct",
    ),
    FamilyEntry(
        "HyperCLOVA X SEED",
        ("HyperCLOVAXForCausalLM",),
        "naver-hyperclovax/HyperCLOVAX-SEED-Think-14B",
    ),
    FamilyEntry(
        "Idefics 3",
        ("Idefics3ForConditionalGeneration",),
        "HuggingFaceM4/Idefics3-8B-Llama3",
    ),
    FamilyEntry(
        "IQuest-Coder", ("IQuestCoderForCausalLM",), "IQuestLab/IQuest-Coder-V1-40B-Instruct"
    ),
    FamilyEntry("Jais 2", ("Jais2ForCausalLM",), "inceptionai/Jais-2-8B-Chat"),
    FamilyEntry("VaultGemma", ("VaultGemmaForCausalLM",), "google/vaultgemma-1b"),
    FamilyEntry(
        "Granite 3 MoE with a shared expert",
        ("GraniteMoeSharedForCausalLM",),
        "ibm-research/moe-7b-1b-active-shared-experts",
    ),
    FamilyEntry("InternLM 1", ("InternLMForCausalLM",), "internlm/internlm-7b", "Llama"),
    FamilyEntry("InternLM 2", ("InternLM2ForCausalLM",), "internlm/internlm2_5-7b-chat", "Llama"),
    FamilyEntry("InternLM 3", ("InternLM3ForCausalLM",), "internlm/internlm3-8b-instruct"),
    FamilyEntry(
        "InternVL 3, 3.5",
        ("InternVLForConditionalGeneration",),
        "OpenGVLab/InternVL3-1B-hf",
    ),
    FamilyEntry(
        "Jamba", ("JambaForCausalLM",), "ai21labs/AI21-Jamba-Reasoning-3B", limits=_RECURRENT
    ),
    FamilyEntry("LFM2", ("Lfm2ForCausalLM",), "LiquidAI/LFM2-350M", limits=_RECURRENT),
    FamilyEntry(
        "LFM2 MoE",
        ("Lfm2MoeForCausalLM",),
        "LiquidAI/LFM2-8B-A1B",
        limits=_RECURRENT,
    ),
    FamilyEntry(
        "LLaVA 1.5, Pixtral",
        ("LlavaForConditionalGeneration",),
        "llava-hf/llava-1.5-7b-hf",
    ),
    FamilyEntry(
        "LLaVA-NeXT (1.6)",
        ("LlavaNextForConditionalGeneration",),
        "llava-hf/llava-v1.6-mistral-7b-hf",
    ),
    FamilyEntry(
        "LLaVA-OneVision",
        ("LlavaOnevisionForConditionalGeneration",),
        "llava-hf/llava-onevision-qwen2-0.5b-ov-hf",
    ),
    FamilyEntry("Llama 1 to 3", ("LlamaForCausalLM",), "meta-llama/Llama-3.2-1B-Instruct"),
    FamilyEntry(
        "Llama 4 (text)",
        ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    ),
    FamilyEntry("Mamba 1", ("MambaForCausalLM",), "state-spaces/mamba-130m-hf", limits=_RECURRENT),
    FamilyEntry(
        "Mamba 2", ("Mamba2ForCausalLM",), "mistralai/Mamba-Codestral-7B-v0.1", limits=_RECURRENT
    ),
    FamilyEntry("MiniCPM 1, 2", ("MiniCPMForCausalLM",), "openbmb/MiniCPM-2B-sft-bf16", "Granite"),
    FamilyEntry("Ministral", ("MinistralForCausalLM",), "mistralai/Ministral-8B-Instruct-2410"),
    FamilyEntry(
        "Mistral Small 3.1, 3.2",
        ("Mistral3ForConditionalGeneration",),
        "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
    ),
    FamilyEntry("Mistral", ("MistralForCausalLM",), "mistralai/Mistral-7B-Instruct-v0.3"),
    FamilyEntry("Mixtral", ("MixtralForCausalLM",), "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    FamilyEntry(
        "MPT",
        ("MptForCausalLM", "MPTForCausalLM"),
        "mosaicml/mpt-7b",
    ),
    FamilyEntry("Nemotron", ("NemotronForCausalLM",), "nvidia/Minitron-4B-Base"),
    FamilyEntry(
        "Nemotron-H",
        ("NemotronHForCausalLM",),
        "nvidia/Nemotron-H-4B-Base-8K",
        limits="without experts; " + _RECURRENT,
    ),
    FamilyEntry("OLMo 1", ("OlmoForCausalLM",), "allenai/OLMo-1B-hf"),
    FamilyEntry("OLMo 2", ("Olmo2ForCausalLM",), "allenai/OLMo-2-0425-1B-Instruct"),
    FamilyEntry("OLMo 3", ("Olmo3ForCausalLM",), "allenai/Olmo-3-7B-Instruct"),
    FamilyEntry("OLMoE", ("OlmoeForCausalLM",), "allenai/OLMoE-1B-7B-0924-Instruct"),
    FamilyEntry("OPT", ("OPTForCausalLM",), "facebook/opt-125m", limits="all but opt-350m"),
    FamilyEntry("Phi 1, 1.5, 2", ("PhiForCausalLM",), "microsoft/phi-2"),
    FamilyEntry("Phi 3, 3.5, 4-mini", ("Phi3ForCausalLM",), "microsoft/Phi-4-mini-instruct"),
    FamilyEntry(
        "Qwen 1.5, 2, 2.5, 2-VL and 2.5-VL",
        (
            "Qwen2ForCausalLM",
            "Qwen2VLForConditionalGeneration",
            "Qwen2_5_VLForConditionalGeneration",
        ),
        "Qwen/Qwen2.5-0.5B-Instruct",
    ),
    FamilyEntry(
        "Qwen 2 Audio", ("Qwen2AudioForConditionalGeneration",), "Qwen/Qwen2-Audio-7B-Instruct"
    ),
    FamilyEntry("Qwen 2 MoE", ("Qwen2MoeForCausalLM",), "Qwen/Qwen1.5-MoE-A2.7B-Chat"),
    FamilyEntry("Qwen 3", ("Qwen3ForCausalLM",), "Qwen/Qwen3-0.6B"),
    FamilyEntry("Qwen 3 MoE", ("Qwen3MoeForCausalLM",), "Qwen/Qwen3-30B-A3B"),
    FamilyEntry(
        "Qwen 3 Next",
        ("Qwen3NextForCausalLM",),
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        limits=_RECURRENT,
    ),
    FamilyEntry(
        "Qwen 3.5 (text)",
        ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
        "Qwen/Qwen3.5-9B",
        limits=_RECURRENT,
    ),
    FamilyEntry(
        "Qwen 3.5 MoE (text)",
        ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        "Qwen/Qwen3.5-35B-A3B",
        limits=_RECURRENT,
    ),
    FamilyEntry(
        "Qwen 3 VL (dense)",
        ("Qwen3VLForConditionalGeneration",),
        "Qwen/Qwen3-VL-2B-Instruct",
    ),
    FamilyEntry("Seed-OSS", ("SeedOssForCausalLM",), "ByteDance-Seed/Seed-OSS-36B-Instruct"),
    FamilyEntry("SmolLM 3", ("SmolLM3ForCausalLM",), "HuggingFaceTB/SmolLM3-3B"),
    FamilyEntry(
        "SmolVLM",
        ("SmolVLMForConditionalGeneration",),
        "HuggingFaceTB/SmolVLM-256M-Instruct",
    ),
    FamilyEntry("Solar Open", ("SolarOpenForCausalLM",), "upstage/Solar-Open-100B"),
    FamilyEntry("StableLM", ("StableLmForCausalLM",), "stabilityai/stablelm-2-1_6b-chat"),
    FamilyEntry("StarCoder 2", ("Starcoder2ForCausalLM",), "bigcode/starcoder2-3b"),
    FamilyEntry(
        "Whisper",
        ("WhisperForConditionalGeneration",),
        "openai/whisper-tiny.en",
        limits="CPU only: [speech to text](audio.md)",
    ),
    FamilyEntry(
        "Zamba2",
        ("Zamba2ForCausalLM",),
        "Zyphra/Zamba2-1.2B-instruct",
        limits="in one process: [recurrent states](recurrent.md)",
    ),
    FamilyEntry("Youtu-LLM", ("YoutuForCausalLM",), "tencent/Youtu-LLM-2B"),
)

_INTRO = """<!-- Made by `python -m octavo_engine.models`: edit models/catalogue.py. -->
# Supported models

{count} families that generate text, as checkpoints of safetensors and, where the table names an
architecture, as GGUF files, whole or split (`NAME-00001-of-00003.gguf`, named by any part). SmolLM
1 and 2, Yi, TinyLlama, Vicuna and others whose `config.json` has `LlamaForCausalLM` are Llamas
here.

Every family runs by `--device cpu` and `--device torch`, and by `--device cuda` unless the table
limits it. The weights of all can be quantised in memory on the CPU (`--quantization int8`, `int4`).

**What is tested.** Of each family a tiny random checkpoint is written by transformers. The torch
reference, the native backend and the plain kernels for devices give its logits in float32 (relative
error 2e-5): in a batch, in chunks, token by token. On the CPU, bfloat16, int8, int4 and each type
of KV cache stay within their tolerances, and a sequence's bits do not depend on the batch or on how
its prompt was cut. Where the column *tested as* names another class, transformers has none for the
family: the weights of the named class are written in the family's own format. Of checkpoints in the
sizes that people use, the tests run SmolLM 2's and Gemma 3's of 270M (Q4_K_M).

| family | architecture | example | GGUF | tested as | limits |
|---|---|---|---|---|---|
"""

_END = """
Architectures of models for embeddings and scores: {encoders}, and the bodies of the families above;
see [Embeddings and ranking](embeddings.md).

`--hf-overrides '{{"architectures": ["LlamaForCausalLM"]}}'` replaces fields of `config.json`:
where a checkpoint names a class of its own but has a supported family's weights, or to set a rope.

Other architectures that transformers generates text with, and encoders and classifiers that it
has, run through [the transformers fallback](transformers-fallback.md); generated text without the
promise of equal bits. A model
can also be added as
[one page in a package of your own](adding-a-model.md#a-model-in-a-package-of-your-own).

## Tokenizers

`tokenizer.json` is read where there is one. Without it:

- **SentencePiece** (`tokenizer.model`, unigram and BPE, with byte fallback and symbols that users
  defined) and **tiktoken** files (`qwen.tiktoken`, Kimi's `tiktoken.model`, Llama 3's
  `tokenizer.model`, `o200k_base`, `cl100k_base`, `p50k_base`, `r50k_base`). Neither library is
  needed. Special and added tokens, and the chat template, come from `tokenizer_config.json`.
- The ids are those of the two libraries, with three exceptions that the `tokenizers` package makes:
  a letter that the model's character map replaces loses a combining accent behind it; a text that
  is one user-defined symbol and nothing else gets no space before it; where user-defined symbols
  overlap, the first one counts.
- Classes that number the pieces in their own way (XLM-RoBERTa, CamemBERT, mBART, NLLB, Pegasus,
  XLNet and others), the SentencePiece types word and char, and tiktoken files of other names are
  refused by name.

In GGUF files the vocabularies `llama` (SentencePiece BPE), `gpt2` (by the rules of
`tokenizer.ggml.pre` that are known) and `bert` (WordPiece) are read; others (`t5`, `rwkv`,
`gemma4`) and unknown rules are refused by name.
"""


def models_page() -> str:
    """docs/models.md."""
    encoders = ", ".join(f"`{name}`" for name in sorted(known_encoders()))
    rows = "\n".join(_rows())
    return _INTRO.format(count=len(CATALOGUE)) + rows + "\n" + _END.format(encoders=encoders)


def _rows() -> Iterator[str]:
    by_class: dict[str, list[str]] = {}
    for name, architecture in ARCHITECTURES.items():
        for own in (architecture.class_name, *architecture.other_classes):
            by_class.setdefault(own, []).append(name)
    for entry in CATALOGUE:
        files = [f"`{name}`" for own in entry.architectures for name in by_class.get(own, [])]
        cells = (
            entry.name,
            ", ".join(f"`{own}`" for own in entry.architectures),
            f"`{entry.example}`",
            ", ".join(files),
            entry.tested_as,
            entry.limits,
        )
        yield "| " + " | ".join(cells) + " |"


def missing_architectures() -> set[str]:
    """Those of the table of families that no entry names."""
    return set(FAMILIES) - {own for entry in CATALOGUE for own in entry.architectures}
