"""A server that speaks Tinker's API: other people's training loops on this backend (docs/tinker.md)."""
