"""Triton kernels by family; each has a twin in `backends.torch.plain` that it must equal."""
