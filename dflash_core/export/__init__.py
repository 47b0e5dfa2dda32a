"""A finished drafter -> the folder that serving engines load."""
