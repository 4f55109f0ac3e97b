"""The sub-commands of `octavo`, one module each, imported only when called."""
