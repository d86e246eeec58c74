"""Plans: which samples run in which micro-batch of which rank, and their cost. Pure numpy; no process group, no
device."""
