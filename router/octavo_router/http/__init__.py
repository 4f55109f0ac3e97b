"""HTTP/1.1 on both sides, as far as a proxy needs it."""
