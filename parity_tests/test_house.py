"""Rules of the house that a reader cannot see broken: where dtypes are named, and what an import pulls in."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DTYPE = re.compile(r"\b(jnp|torch|np|ml_dtypes)\.(float16|bfloat16|float32)\b|\.(float|half|bfloat16)\(\)")


@pytest.mark.parametrize("package", ["jax_dflash", "torch_ref"])
def test_only_numerics_names_float_dtypes(package):
    """Would catch: a cast that the dtype policy cannot reach, which makes the float64 run something other than float64."""
    found = [
        f"{path.relative_to(ROOT)}:{i}: {line.strip()}"
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.name not in ("numerics.py", "steptime.py")  # steptime draws inputs, it computes nothing
        for i, line in enumerate(path.read_text().splitlines(), 1)
        if DTYPE.search(line)
    ]
    assert found == []


PLAIN = (
    "config keys checkpoint_forms names stored roofline buckets taps batch request_table pages sampling_params "
    "target_batch decoding traces record judge excerpts inspect cli".split()
)  # fmt: skip


@pytest.mark.parametrize("module", ["", *(f".{name}" for name in PLAIN)])
def test_plain_modules_import_no_framework(module):
    """Would catch: a module shared by both frameworks that brings one of them along."""
    code = f"import sys, jax_dflash{module}; print([m for m in ('jax', 'torch', 'flax') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"
