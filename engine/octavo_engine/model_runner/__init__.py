"""Turns a scheduled batch into the flat arrays of a step and hands them to the backend."""
