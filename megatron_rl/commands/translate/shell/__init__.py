"""Reads the bash of launch scripts without running it: what a command would be given, as far as that is known.

No library does so: bashlex (GPL, last release 2023) and tree-sitter's grammar parse, and end where
expansion begins.
"""
