"""Attention over the paged pool: `dense` is the plain one; every implementation has its signature."""
