"""DFlash speculative drafting in JAX. Import from the submodules: nothing is imported here."""
