"""Pictures of the dashboards, drawn from their own JSON and what a Prometheus answers to it."""
