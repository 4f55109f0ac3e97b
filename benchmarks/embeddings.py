"""Documents embedded in a second, beside the sentence-transformers library on the same cores.

    python benchmarks/embeddings.py [--threads 2] [--documents 400] [--rounds 3]

Both sides have the same weights, documents and threads, and take turns. The library may choose its
best batch size. Documents are as long as those of a search index: mostly passages, some titles, a
few that are cut at the model's limit. On a machine with other work, times of the wall say little;
the processor's time for a document then says more, best with one thread, which waits for no other:
neighbours only ever add to it, so the least of the rounds is shown, and many short ones are best.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from octavo_engine.core.offline.llm import LLM
from octavo_engine.weights.source import locate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray


MODEL = "demo://minilm"
BATCH_SIZES = (8, 32, 128)  # of the library, whose own default is 32
COMMON = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from "
    "or had an they which one you were all her she there would their we him been has when who will "
    "no more if out so up said what its about than into them can only other time new some could "
    "these two may first then do any like my now over such our man me even most made after also "
    "kubernetes scheduler container latency throughput embedding tokenizer replica gateway quantum "
    "photosynthesis mitochondria jurisdiction amendment shareholder quarterly dividend orchestra"
)
WORDS = COMMON.split()


class Taken(NamedTuple):
    """Seconds."""

    wall: float
    processor: float  # of all threads


class Embed(Protocol):
    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]: ...


class Contender(NamedTuple):
    name: str
    embed: Embed


def documents(count: int, seed: int) -> list[str]:
    """One in six a title of 3 to 12 words, the others passages: log-normal, about 75 words."""
    rng = random.Random(seed)
    lengths = (
        rng.randint(3, 12) if rng.random() < 1 / 6 else int(rng.lognormvariate(4.1, 0.7)) + 4
        for _ in range(count)
    )
    return [" ".join(rng.choices(WORDS, k=length)) for length in lengths]


OURS: Mapping[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int8, activations in 8 bits": {"quantization": "int8", "activation_bits": 8},
}


def ours(threads: int, form: str) -> Contender:
    llm = LLM(MODEL, num_threads=threads, **OURS[form])

    def embed(texts: Sequence[str]) -> NDArray[np.float32]:
        return np.stack([r.outputs.embedding for r in llm.embed(list(texts), truncate=True)])

    return Contender(f"octavo {form}", embed)


def library(threads: int, sample: Sequence[str]) -> Contender:
    """sentence-transformers at its best batch size for such documents."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model = SentenceTransformer(str(locate(MODEL)), device="cpu")

    def with_batches(size: int) -> Embed:
        return lambda texts: np.asarray(
            model.encode(list(texts), batch_size=size, show_progress_bar=False)
        )

    seconds = {size: timed(with_batches(size), sample)[0].processor for size in BATCH_SIZES}
    best = min(seconds, key=seconds.__getitem__)
    return Contender(f"sentence-transformers, batches of {best}", with_batches(best))


def timed(embed: Embed, texts: Sequence[str]) -> tuple[Taken, NDArray[np.float32]]:
    wall, processor = time.perf_counter(), time.process_time()
    rows = embed(texts)
    return Taken(time.perf_counter() - wall, time.process_time() - processor), rows


def compare(
    contenders: Sequence[Contender], texts: Sequence[str], rounds: int,
    show: Callable[[str], None],
) -> None:  # fmt: skip
    """Everyone in turn, `rounds` times; the median by the wall, the least of the processor, and how
    near the vectors lie."""
    times: dict[str, list[Taken]] = {c.name: [] for c in contenders}
    vectors: dict[str, NDArray[np.float32]] = {}
    for contender in contenders:
        contender.embed(texts[:32])
    for _ in range(rounds):
        for contender in contenders:
            taken, vectors[contender.name] = timed(contender.embed, texts)
            times[contender.name].append(taken)
    typical = {
        name: Taken(
            statistics.median(one.wall for one in taken), min(one.processor for one in taken)
        )
        for name, taken in times.items()
    }
    base, truth = typical[contenders[0].name], vectors[contenders[0].name]
    for contender in contenders:
        wall, processor = typical[contender.name]
        cosines = (vectors[contender.name] * truth).sum(axis=1)
        show(
            f"{contender.name:40} {len(texts) / wall:7.1f} documents/s ({base.wall / wall:.2f} x)  "
            f"{processor / len(texts) * 1e3:7.2f} ms of processor each "
            f"({base.processor / processor:.2f} x)  least cosine {cosines.min():.6f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    texts = documents(args.documents, args.seed)
    contenders = [library(args.threads, texts[:128])]
    contenders += [ours(args.threads, form) for form in OURS]
    compare(contenders, texts, args.rounds, print)


if __name__ == "__main__":
    main()
