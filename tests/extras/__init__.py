"""The extras of setup.py resolve; needs the package index."""
