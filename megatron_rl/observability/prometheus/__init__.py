"""The metrics of a run for Prometheus: their names and values, and the HTTP server that Prometheus reads."""
