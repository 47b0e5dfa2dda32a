"""Servers with an exported drafter: started by us or by others, and asked what they accept."""
