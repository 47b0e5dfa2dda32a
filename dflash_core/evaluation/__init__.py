"""How good a finished drafter is: held-out prompts, decoded with it and with what it must beat."""
