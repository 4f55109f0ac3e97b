"""LangChain against an Octavo URL: pip install langchain-openai; octavo serve smollm2."""

import os

import httpx
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

URL = os.environ.get("OCTAVO_URL", "http://localhost:8000")
model = httpx.get(f"{URL}/v1/models").json()["data"][0]["id"]
chat = ChatOpenAI(
    base_url=f"{URL}/v1",
    api_key=os.environ.get("OCTAVO_API_KEY", "none"),
    model=model,
    temperature=0,
    max_tokens=32,
)
chain = ChatPromptTemplate.from_messages([("user", "What is the capital of {country}?")]) | chat
print(chain.invoke({"country": "France"}).content)
