"""Measuring an engine beside what its machine allows."""
