"""An answer as it is generated, and its usage: pip install openai; octavo serve smollm2."""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OCTAVO_URL", "http://localhost:8000") + "/v1",
    api_key=os.environ.get("OCTAVO_API_KEY", "none"),
)
stream = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Write two sentences about the sea."}],
    max_tokens=64,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage:
        print(f"\n{chunk.usage.completion_tokens} tokens")
