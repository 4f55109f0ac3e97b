"""Requests, their progress and their outputs: values without behaviour."""
