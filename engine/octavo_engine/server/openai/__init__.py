"""The OpenAI API: completions, chat, responses, batches, models."""
