"""Tokenization: completions -> token ids and loss masks, exactly as serving renders them, one shard a source file."""
