"""Endpoints of models that do not generate: embeddings, scores, classes, hidden states."""
