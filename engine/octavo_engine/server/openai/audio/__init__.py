"""/v1/audio: speech to text, in OpenAI's shapes."""
