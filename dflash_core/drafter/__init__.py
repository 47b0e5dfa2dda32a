"""The drafter: its shape, what its queries may see, the model, the loss, its files. Shape legend in `model`."""
