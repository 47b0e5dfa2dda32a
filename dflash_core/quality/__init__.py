"""What the data is like, exactly: statistics per file and over all, the gate, its pictures and the training set."""
