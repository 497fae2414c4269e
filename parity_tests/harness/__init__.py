"""The parity harness: an independent oracle, and the tools that compare both frameworks with it."""
