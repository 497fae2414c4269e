"""The PyTorch reference of the DFlash draft step. Import from the submodules: nothing is imported here."""
