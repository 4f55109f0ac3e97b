"""Adapters of pools: where they are loaded, and what is loaded or unloaded next."""
