"""`octavo bench`: load generation and reports."""
