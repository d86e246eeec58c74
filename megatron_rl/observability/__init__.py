"""Metrics, times, throughput, the progress bar and the report page."""
