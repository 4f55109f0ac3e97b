"""The torch backend: every operation at once; on CPU in float32 it defines the truth."""
