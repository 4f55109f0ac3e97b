"""One request from its client to an engine and its answer back."""
