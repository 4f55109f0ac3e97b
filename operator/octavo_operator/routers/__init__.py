"""The state that all router replicas report, polled and merged."""
