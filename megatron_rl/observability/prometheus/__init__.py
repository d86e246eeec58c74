"""The metrics of a run for Prometheus: names, values, and the server that is scraped."""
