"""Routes for operators: probes, metrics, drain, pause, sleep, aborts, development."""
