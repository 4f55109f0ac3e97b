"""What is derived from the CRD's YAML, the one source: a JSON schema and a reference page."""
