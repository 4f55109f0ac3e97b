"""The CPU backend: records a model into a program that csrc runs in one call. No torch."""
