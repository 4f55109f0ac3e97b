"""Questions about documents: embeddings find passages, reranking orders them, a model answers.

pip install httpx; octavo serve minilm --port 8001; octavo serve smollm2
"""

import os

import httpx

CHAT = os.environ.get("OCTAVO_URL", "http://localhost:8000")
EMBED = os.environ.get("OCTAVO_EMBED_URL", "http://localhost:8001")
DOCUMENTS = [
    "An octavo is a sheet of paper that is folded three times, into eight leaves.",
    "The octopus has eight arms and three hearts.",
    "A quarto is a sheet that is folded twice, into four leaves.",
    "Paris is the capital of France.",
]
QUESTION = "How many leaves does an octavo have?"


def post(url: str, body: dict) -> dict:
    answer = httpx.post(url, json=body, timeout=60)
    answer.raise_for_status()
    return answer.json()


def model_of(url: str) -> str:
    return httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]


embedder = model_of(EMBED)
texts = {"model": embedder, "input": [QUESTION, *DOCUMENTS]}
question, *vectors = (each["embedding"] for each in post(f"{EMBED}/v1/embeddings", texts)["data"])
# Vectors have length 1: their product is the cosine.
scores = [sum(a * b for a, b in zip(question, vector, strict=True)) for vector in vectors]
nearest = sorted(range(len(DOCUMENTS)), key=scores.__getitem__, reverse=True)[:3]
passages = [DOCUMENTS[index] for index in nearest]

ranked = post(
    f"{EMBED}/v1/rerank",
    {"model": embedder, "query": QUESTION, "documents": passages, "top_n": 2},
)
context = "\n".join(passages[each["index"]] for each in ranked["results"])
answer = post(
    f"{CHAT}/v1/chat/completions",
    {
        "model": model_of(CHAT),
        "messages": [
            {"role": "system", "content": f"Answer from this text only:\n{context}"},
            {"role": "user", "content": QUESTION},
        ],
        "temperature": 0,
        "max_tokens": 48,
    },
)
print(context)
print("→", answer["choices"][0]["message"]["content"])
