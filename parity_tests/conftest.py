import pytest
import torch

from parity_tests.tiny import FRAMEWORKS

torch.set_num_threads(1)  # tiny steps on shared cores: two threads take 40 times as long


@pytest.fixture(params=["jax", "torch"])
def f(request):
    """One framework's modules and arrays: a test that takes this runs in both."""
    return FRAMEWORKS[request.param]
