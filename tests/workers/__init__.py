"""The pool of gloo workers, and the tests that need more of it than one fixture."""
