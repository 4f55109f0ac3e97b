"""The inference engine. Imports nothing, so that `octavo_engine.protocol` costs nothing."""

__version__ = "0.1.0"
