"""The web page on this host that follows a run: its metrics as they are written, and its rollouts."""
