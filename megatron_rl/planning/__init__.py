"""Plans: the micro-batches of each rank, their samples and their costs. Pure numpy, no process group, no device."""
