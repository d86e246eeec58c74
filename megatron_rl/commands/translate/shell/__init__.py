"""The reader of launch scripts in bash, without running them: it finds commands' arguments as far as they are known.

No library does so: bashlex (GPL, last release 2023) and tree-sitter's grammar parse, but do not
expand.
"""
