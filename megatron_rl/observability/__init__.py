"""The metrics, stage times, throughput, progress bar and report page of a run, and the services that receive them."""
