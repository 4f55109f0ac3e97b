"""The torch backend: every operation at once, in plain torch; on CPU in float32 it defines the truth."""
