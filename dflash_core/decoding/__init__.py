"""What serving does with a drafter: propose, verify with the target, count."""
