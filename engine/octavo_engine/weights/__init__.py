"""Model files: where they are, what is in them, how a stored tensor is read."""
