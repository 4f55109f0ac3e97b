"""LiteLLM against an Octavo URL: pip install litellm; octavo serve smollm2."""

import os

import httpx
from litellm import completion

URL = os.environ.get("OCTAVO_URL", "http://localhost:8000")
model = httpx.get(f"{URL}/v1/models").json()["data"][0]["id"]
answer = completion(
    model=f"openai/{model}",
    api_base=f"{URL}/v1",
    api_key=os.environ.get("OCTAVO_API_KEY", "none"),
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    temperature=0,
    max_tokens=32,
)
print(answer.choices[0].message.content)
