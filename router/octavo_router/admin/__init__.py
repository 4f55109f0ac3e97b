"""The router's own routes: probes, metrics, models, state page, debug pages."""
