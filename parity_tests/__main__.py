"""`python -m parity_tests`."""

from parity_tests.harness.cli import main

main()
