"""Metrics, stage times, throughput, the progress bar and the report page of a run."""
