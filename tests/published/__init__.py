"""Configs of released models as they were published (a folder each), and thin copies of them."""
