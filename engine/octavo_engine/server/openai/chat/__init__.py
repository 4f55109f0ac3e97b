"""POST /v1/chat/completions: from the conversation to the streamed or whole message."""
