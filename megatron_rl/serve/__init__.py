"""A server of Tinker's API, on which clients run their own training loops with this backend (docs/tinker.md)."""
