"""Hostile input at scale: mutated files for parsers of outside bytes, and generated requests."""
