"""The Anthropic Messages API, over the chat."""
