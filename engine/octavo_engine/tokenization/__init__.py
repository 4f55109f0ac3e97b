"""Text to ids and back: tokenizer, incremental detokeniser, chat template."""
