"""KV memory: which blocks are free, shared or cached, and which sequence holds them."""
