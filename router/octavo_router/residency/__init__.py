"""Which prompt prefixes lie in which engine's memory, by route key."""
