"""What serving would do with the drafter: draft, verify with the whole target, count."""
