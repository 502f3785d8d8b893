"""Advantages, losses, aggregation, KL and log-probs: pure tensor functions on packed tokens."""
