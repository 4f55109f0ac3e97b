"""Who may send how much, and who waits."""
