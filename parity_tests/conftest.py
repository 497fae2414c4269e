import os

import pytest
import torch

# Half of the tests' time was LLVM's: their programs are small and run once. `make compare` and `make parity` run what users
# run. Before JAX is imported, and for the processes that tests start.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()

from parity_tests.tiny import FRAMEWORKS  # noqa: E402

torch.set_num_threads(1)  # tiny steps on shared cores: two threads take 40 times as long


@pytest.fixture(params=["jax", "torch"])
def f(request):
    """One framework's modules and arrays: a test that takes this runs in both."""
    return FRAMEWORKS[request.param]
