"""Which sequences get how many tokens in the next step. No tensors."""
