"""Public DFlash implementations, run in an environment of their own, against ours."""
