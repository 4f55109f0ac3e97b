"""The router's settings: the tree, its checks, loading, printing, documentation."""
