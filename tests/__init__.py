"""Tests are one package, so that a function in a test module has one importable name, in the pool's workers too."""
