"""The page on this host that follows a run: its metrics as they come, and its rollouts."""
