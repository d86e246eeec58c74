"""The metrics of a run as Prometheus reads them: names, values, and the server that is asked for them."""
