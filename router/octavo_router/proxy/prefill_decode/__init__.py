"""Requests whose prompt is computed by one engine and whose answer comes from another."""
