"""Endpoints and pools from the Kubernetes API, by list and watch."""
