"""JAX in float64: a process with JAX_ENABLE_X64=1 that answers one line of JSON per case. Not for people."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from parity_tests.harness import case as cases
from parity_tests.harness.mutations import planted
from parity_tests.harness.runners import _run_jax


def answer(request: dict) -> None:
    """Run the case of a folder and leave its trace there."""
    folder = Path(request["folder"])
    forced = load_file(folder / "forced.safetensors") if request["forced"] else None
    with planted(request["plant"], "jax") if request["plant"] else nullcontext():
        trace = _run_jax(cases.load(folder / "case.safetensors"), "float64", forced, 2, "jit")
    save_file({name: np.ascontiguousarray(value) for name, value in trace.items()}, folder / "trace.safetensors")


def main() -> None:
    for line in sys.stdin:
        try:
            answer(json.loads(line))
            print("{}", flush=True)
        except Exception as error:  # noqa: BLE001 - the caller raises it with this text
            print(json.dumps({"error": f"{type(error).__name__}: {error}".splitlines()[0]}), flush=True)


if __name__ == "__main__":
    main()
