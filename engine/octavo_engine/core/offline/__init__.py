"""`LLM`: the engine in the process of its caller, without a server."""
