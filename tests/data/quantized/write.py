"""Writes this folder: a tiny Llama as each library writes it, and the values that it unpacks.

    python tests/data/quantized/write.py NAME...

Installing and running the libraries takes minutes, and some compile kernels, so their files are
kept here. They are made again by hand, on a CPU and in an environment of its own, with auto-round
0.16.1, autoawq 0.2.9 (beside transformers 4.51.3), gptqmodel 7.7.0 (from its sources), hqq 0.2.8
(DISABLE_CUDA=1) and torchao 0.18.0. Without names, all are made.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(__file__).parent
GROUP = 32
VOCABULARY = 64


def tiny(folder: Path) -> Path:
    """A random model of one layer and its tokenizer."""
    transformers: Any = importlib.import_module("transformers")
    tokenizers: Any = importlib.import_module("tokenizers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).half()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:  # as wide as a trained model's
                parameter.mul_(4)
    model.save_pretrained(folder)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w3", pad_token="w0"
    ).save_pretrained(folder)
    return folder


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, VOCABULARY, (16, 64), generator=generator).tolist()


def loaded(folder: Path, dtype: torch.dtype) -> Any:
    transformers: Any = importlib.import_module("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def by_auto_round(
    plain: Path, out: Path, bits: int, packing: str, **options: Any
) -> dict[str, Any]:
    library: Any = importlib.import_module("auto_round")
    transformers: Any = importlib.import_module("transformers")
    texts = [" ".join(f"w{token}" for token in prompt) for prompt in prompts()]
    rounding = library.AutoRound(
        loaded(plain, torch.float16), tokenizer=transformers.AutoTokenizer.from_pretrained(plain),
        bits=bits, group_size=GROUP, iters=8, device_map="cpu", dataset=texts, seqlen=64,
        nsamples=len(texts), **options,
    )  # fmt: skip
    rounding.quantize_and_save(str(out), format=packing)
    [written] = {path.parent for path in out.rglob("model.safetensors")}
    if written != out:
        shutil.copytree(written, out, dirs_exist_ok=True)
    return by_products(loaded(written, torch.float32))


def by_gptqmodel(plain: Path, out: Path, bits: int, **options: Any) -> dict[str, Any]:
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "4")  # on two cores it refuses its own default
    library: Any = importlib.import_module("gptqmodel")
    config = library.QuantizeConfig(
        bits=bits, group_size=GROUP, pack_impl="original", **options
    )  # which compiles nothing
    model = library.GPTQModel.load(str(plain), config, device="cpu")
    model.quantize(
        [{"input_ids": prompt, "attention_mask": [1] * len(prompt)} for prompt in prompts()],
        batch_size=1,
    )
    model.save(str(out))
    again = library.GPTQModel.load(str(out), device="cpu", backend=library.BACKEND.GPTQ_TORCH)
    return {
        name: module.dequantize_weight().T
        for name, module in again.model.named_modules()
        if name.endswith("_proj")
    }


def by_hqq(plain: Path, out: Path, bits: int) -> dict[str, Any]:
    library: Any = importlib.import_module("hqq.core.quantize")
    models: Any = importlib.import_module("hqq.models.hf.base")
    model = loaded(plain, torch.float16)
    config = model.config.to_dict()
    model.lm_head = torch.nn.Identity()  # tied to the embedding
    models.AutoHQQHFModel.quantize_model(
        model, quant_config=library.BaseQuantizeConfig(nbits=bits, group_size=GROUP, axis=1),
        compute_dtype=torch.float16, device="cpu",
    )  # fmt: skip
    models.AutoHQQHFModel.save_to_safetensors(model, str(out))
    config["quantization_config"] = {"quant_method": "hqq", "skip_modules": ["lm_head"]}
    (out / "config.json").write_text(json.dumps(config, indent=2, default=str))
    return {
        name: module.dequantize()
        for name, module in model.named_modules()
        if name.endswith("_proj")
    }


def by_torchao(plain: Path, out: Path, scheme: str) -> dict[str, Any]:
    library: Any = importlib.import_module("torchao.quantization")
    transformers: Any = importlib.import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.bfloat16, device_map="cpu",
        quantization_config=transformers.TorchAoConfig(getattr(library, scheme)()),
    )  # fmt: skip
    model.save_pretrained(out)
    return {
        name: module.weight.dequantize()
        for name, module in model.named_modules()
        if name.endswith("_proj")
    }


def by_autoawq(plain: Path, out: Path, version: str) -> dict[str, Any]:
    library: Any = importlib.import_module("awq")
    packing: Any = importlib.import_module("awq.utils.packing_utils")
    transformers: Any = importlib.import_module("transformers")
    scheme = {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": version}
    model = library.AutoAWQForCausalLM.from_pretrained(
        str(plain), device_map="cpu", torch_dtype=torch.float16
    )
    model.quantize(
        transformers.AutoTokenizer.from_pretrained(plain), quant_config=dict(scheme),
        calib_data=prompts(), max_calib_seq_len=64, apply_clip=False,
    )  # fmt: skip
    model.save_quantized(str(out))
    if version == "GEMV":  # its product needs a GPU; the other form of the same numbers does not
        return by_autoawq(plain, out.with_name("gemm"), "GEMM")
    return {
        name: packing.dequantize_gemm(
            module.qweight, module.qzeros, module.scales, module.w_bit, module.group_size
        ).T
        for name, module in model.model.named_modules()
        if name.endswith("_proj")
    }


def by_products(model: Any) -> dict[str, Any]:
    """A matrix as a layer multiplies it: each column by a vector with one 1."""
    values = {}
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            with torch.no_grad():
                columns = module.infeatures if hasattr(module, "infeatures") else module.in_features
                values[name] = module(torch.eye(columns)).T
    return values


FILES: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "autoawq-gemm": lambda plain, out: by_autoawq(plain, out, "GEMM"),
    "autoawq-gemv": lambda plain, out: by_autoawq(plain, out, "GEMV"),
    "auto-round-4": lambda plain, out: by_auto_round(plain, out, 4, "auto_round"),
    "auto-round-2": lambda plain, out: by_auto_round(plain, out, 2, "auto_round"),
    "gptqmodel-4": lambda plain, out: by_gptqmodel(plain, out, 4),
    "gptqmodel-4-desc-act": lambda plain, out: by_gptqmodel(
        plain, out, 4, desc_act=True, sym=False
    ),
    "gptqmodel-3": lambda plain, out: by_gptqmodel(plain, out, 3),
    "gptqmodel-8": lambda plain, out: by_gptqmodel(plain, out, 8),
    "hqq-4": lambda plain, out: by_hqq(plain, out, 4),
    "hqq-3": lambda plain, out: by_hqq(plain, out, 3),
    "torchao-int8": lambda plain, out: by_torchao(plain, out, "Int8WeightOnlyConfig"),
    "torchao-float8": lambda plain, out: by_torchao(plain, out, "Float8WeightOnlyConfig"),
}


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or FILES:
        with tempfile.TemporaryDirectory() as scratch:
            plain, out = tiny(Path(scratch) / "plain"), Path(scratch) / name
            values = FILES[name](plain, out)
            keep(out, FOLDER / name, values)


def keep(written: Path, folder: Path, values: dict[str, Any]) -> None:
    """What the library wrote, without what serves the library alone."""
    folder.mkdir(exist_ok=True)
    config = json.loads((written / "config.json").read_text(encoding="utf-8"))
    config.pop("_name_or_path", None)
    config["quantization_config"].pop("meta", None)  # gptqmodel's, with folders of the machine
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    shutil.copy(written / "model.safetensors", folder)
    arrays = {name: value.detach().float().numpy() for name, value in values.items()}
    halves = {name: array.astype(np.float16) for name, array in arrays.items()}
    if all((halves[name] == array).all() for name, array in arrays.items()):
        arrays = halves
    np.savez_compressed(folder / "dequantized.npz", **arrays)
    sys.stdout.write(
        f"{folder.name}: {len(arrays)} matrices of {next(iter(arrays.values())).dtype}\n"
    )


if __name__ == "__main__":
    main()
