"""Prompts in S3 -> an OpenAI-compatible server -> completions in S3, every prompt once however often killed."""
