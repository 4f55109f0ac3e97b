"""Brings a model's files from where they are published into a folder, whole or not at all."""
