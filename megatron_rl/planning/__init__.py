"""Plans: the micro-batches of each rank, their samples and their cost. Pure numpy; no process group, no device."""
