"""What engines tell: load and residency."""
