"""A reader of bash launch scripts that runs nothing: it finds the commands' arguments as far as they are known.

No library does this: bashlex (GPL, last release 2023) and tree-sitter's grammar parse scripts, but
do not expand variables.
"""
