"""The selection of shards that a drafter is trained on, and the gate's verdict on it."""
