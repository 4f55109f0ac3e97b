"""The engine of encoders: whole texts in, vectors or scores out."""
