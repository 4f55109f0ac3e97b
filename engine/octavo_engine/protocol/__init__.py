"""The wire between engine, router and operator: paths, headers, metric names, hashes. Standard library only."""
