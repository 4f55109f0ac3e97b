"""Pictures on their way to the engine: decoded, prepared, put into prompts."""
