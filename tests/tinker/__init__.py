"""The SDK and the cookbook of Tinker, unmodified, against the server on two processes: `make test-tinker`."""
