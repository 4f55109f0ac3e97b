"""Models that have no page here, computed by transformers over our paged KV cache."""
