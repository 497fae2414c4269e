"""`python -m jax_dflash`."""

from jax_dflash.cli import main

main()
