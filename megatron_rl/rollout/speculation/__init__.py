"""Drafts of a sample's next tokens from earlier answers, so that one forward pass can check several tokens."""
