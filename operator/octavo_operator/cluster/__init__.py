"""The Kubernetes API: clients, credentials, rights, the leader lease, guarded writes."""
