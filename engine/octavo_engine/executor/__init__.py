"""Where the workers live."""
