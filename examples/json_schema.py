"""An answer that fits a JSON schema, always: pip install openai; octavo serve smollm2."""

import json
import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OCTAVO_URL", "http://localhost:8000") + "/v1",
    api_key=os.environ.get("OCTAVO_API_KEY", "none"),
)
schema = {
    "type": "object",
    "properties": {
        "country": {"type": "string", "maxLength": 20},
        "capital": {"type": "string", "maxLength": 20},
        "continent": {"enum": ["Africa", "America", "Asia", "Europe", "Oceania"]},
    },
    "required": ["country", "capital", "continent"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Describe France as JSON."}],
    response_format={"type": "json_schema", "json_schema": {"name": "country", "schema": schema}},
    temperature=0,
    max_tokens=128,
)
print(json.loads(answer.choices[0].message.content))
