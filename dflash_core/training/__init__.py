"""Online training: frozen target with hooks, placement on devices, the step, the loop, checkpoints, the launcher."""
