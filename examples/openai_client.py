"""One answer through the openai package: pip install openai; octavo serve smollm2."""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OCTAVO_URL", "http://localhost:8000") + "/v1",
    api_key=os.environ.get("OCTAVO_API_KEY", "none"),
)
model = client.models.list().data[0].id
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    temperature=0,
    max_tokens=32,
)
print(answer.choices[0].message.content)
