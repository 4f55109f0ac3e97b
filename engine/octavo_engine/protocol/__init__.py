"""The wire between engine, router and operator. Standard library only."""
