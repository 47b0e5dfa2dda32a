"""A completion -> its token ids and loss mask, exactly as serving renders it."""
