"""A function that the model calls: pip install openai; octavo serve qwen3:0.6b.

The call is forced, so that its arguments fit the schema with any model; leave `tool_choice` out to
let the model decide.
"""

import json
import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OCTAVO_URL", "http://localhost:8000") + "/v1",
    api_key=os.environ.get("OCTAVO_API_KEY", "none"),
)
schema = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "unit": {"enum": ["celsius"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "How warm is it in Paris?"}],
    tools=[
        {
            "type": "function",
            "function": {"name": "temperature", "description": "Now.", "parameters": schema},
        }
    ],
    tool_choice={"type": "function", "function": {"name": "temperature"}},
    temperature=0,
    max_tokens=64,
)
call = answer.choices[0].message.tool_calls[0].function
print(call.name, json.loads(call.arguments))
