"""Public DFlash implementations against this project's three on the same weights and inputs: `make oracles`.

python -m parity_tests.oracles.agreement --venv DIR      DIR: an environment of constraints/oracles.txt

Every model of `models()` drafts for one request of each of `CONTEXTS` rows: the public packages one request at a time
(public_models.py in DIR), ours all requests in one padded step of paged context, loaded from a published checkpoint
folder. The last stdout line is one JSON document. Exit 0: all agreed; 1: not; 125: DIR cannot run the public packages.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jax_dflash.batch import TargetStep
from jax_dflash.buckets import BucketLadder
from jax_dflash.config import parse_draft_config
from jax_dflash.names import draft_tensors, write_config
from jax_dflash.target import load_target, pack_target
from jax_dflash.weights import load_tensors, save_tensors
from parity_tests.harness import oracle64
from parity_tests.tiny import random_values, relative_rmse

ROOT = Path(__file__).parents[2]
BUILTIN = ROOT / "jax_dflash/assets/builtin"
CONTEXTS = (5, 37, 120)
MAX_MODEL_LEN, PAGE = 160, 16
# Relative RMS distance of hidden states and logits; public_models.py says what the runs are. float64 has float32's limit:
# the packages' norms, RoPE and eager softmax are in float32 whatever the weights are. pure64 lifts just that, and sees
# what float32 cannot: doubling the norms' epsilon moves trained weights by 4e-6.
LIMITS = {"float32": 1e-5, "float64": 1e-5, "pure64": 1e-11}
SIGMAS = 5  # a token is decided if its float64 top-2 margin is more than this times the RMS distance of the two rows

OURS = ("JAX", "PyTorch", "numpy")
MAX_ERROR = 1e30  # stands for an error that is not finite: JSON has no infinity

Drafts = list[dict[str, np.ndarray]]  # hidden [K, D] and logits [K, V] of each request


class Row(NamedTuple):
    """A package's run of one request against one implementation of ours: the larger error of hidden states and logits,
    and of its tokens how many are decided, and equal among those."""

    package: str
    run: str
    ours: str
    error: float
    equal: int
    decided: int
    tokens: int


def small_config(**changes) -> dict:
    """A config.json in z-lab's form."""
    nested = {"mask_token_id": 127, "target_layer_ids": [0, 2, 4]} | changes.pop("dflash_config", {})
    sizes = {
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "block_size": 8, "num_target_layers": 6,
        "max_position_embeddings": 256, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    form = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": False}
    return form | sizes | changes | {"dflash_config": nested}


def models() -> Iterator[tuple[str, dict, dict[str, np.ndarray], int]]:
    """Name, config.json, tensors with embedding and head, and K. The shipped pair comes with its trained weights."""
    other = small_config(
        hidden_size=72, intermediate_size=104, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=3,
        head_dim=24, vocab_size=101, block_size=5, rope_theta=1e6, rms_norm_eps=1e-5,
        dflash_config={"mask_token_id": 97, "target_layer_ids": [1, 3]},
    )  # fmt: skip
    random = (("h64", small_config(), 7), ("h64-k3", small_config(), 3), ("h72", other, 4))
    for seed, (name, raw, K) in enumerate(random):
        config, rng = parse_draft_config(raw), np.random.default_rng(seed)
        tables = rng.standard_normal((2, config.geometry.vocab_size, config.geometry.hidden_size))
        tensors = random_values(draft_tensors(config), seed)
        tensors |= {"embed_tokens.weight": tables[0], "lm_head.weight": tables[1]}
        yield name, raw, {name: as_published(value) for name, value in tensors.items()}, K
    raw = json.loads((BUILTIN / "drafter/config.json").read_text())
    tensors = load_tensors(BUILTIN / "drafter", draft_tensors(parse_draft_config(raw)), jnp.float32)
    config, target = load_target(BUILTIN / "target", jnp.float32)
    tables = pack_target(target, config)
    tensors |= {"embed_tokens.weight": tables.embed_tokens, "lm_head.weight": tables.lm_head}
    yield "builtin", raw, {name: np.array(value) for name, value in tensors.items()}, raw["block_size"] - 1


def as_published(value: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 as float32: exact in every dtype that reads it."""
    return value.astype(ml_dtypes.bfloat16).astype(np.float32)


def write_model(folder: Path, raw: dict, tensors: dict[str, np.ndarray], K: int) -> None:
    """A published checkpoint folder, and in it the case of each request."""
    folder.mkdir()
    write_config(folder, raw)
    config = parse_draft_config(raw)
    save_tensors(folder, {name: jnp.asarray(tensors[name], jnp.bfloat16) for name in draft_tensors(config)})
    for i, rows in enumerate(CONTEXTS):
        rng = np.random.default_rng(rows)
        features = as_published(rng.standard_normal((rows, config.feature_size)))
        anchor = int(rng.integers(config.mask_token_id))
        meta = {"config": json.dumps(raw), "anchor": str(anchor), "num_speculative_tokens": str(K)}
        save_file(tensors | {"features": features}, folder / f"{i}.case.safetensors", metadata=meta)


def read_cases(folder: Path) -> tuple[list[dict[str, np.ndarray]], np.ndarray, int]:
    """Each request's tensors, their anchors [n], and K."""
    paths = [folder / f"{i}.case.safetensors" for i in range(len(CONTEXTS))]
    metas = [safe_open(path, "np").metadata() for path in paths]
    anchors = np.array([int(meta["anchor"]) for meta in metas], np.int32)
    return [load_file(path) for path in paths], anchors, int(metas[0]["num_speculative_tokens"])


def draft(package: str, folder: Path, dtype: str) -> Drafts:
    """One step of a DraftEngine of ours; `package` is jax_dflash or torch_ref."""
    drafter, engine, numerics = (importlib.import_module(f"{package}.{m}") for m in ("drafter", "engine", "numerics"))
    cases, anchors, K = read_cases(folder)
    n, kind = len(cases), numerics.as_dtype(dtype)
    config, module = drafter.load_drafter(folder, kind)
    tables = [cases[0][name] for name in ("embed_tokens.weight", "lm_head.weight")]
    if package == "torch_ref":
        numerics.pin_numerics()
        tables, own = [torch.from_numpy(table).to(kind) for table in tables], {"attention": "dense"}
    else:
        tables, own = [jnp.asarray(table, kind) for table in tables], {}
    weights = drafter.pack_drafter(module, config, *tables)
    sizes = {"max_num_seqs": n + 1, "max_model_len": MAX_MODEL_LEN, "page_size": PAGE, "num_speculative_tokens": K}
    own["ladder"] = BucketLadder([(n + 1) * (K + 1)], max_num_seqs=n + 1, query_lens=K + 1)  # one bucket, padded
    it = engine.DraftEngine(config, weights, **sizes, max_num_batched_tokens=sum(CONTEXTS), taps=1, **own)
    it.capture(progress=False)
    for i, rows in enumerate(CONTEXTS):
        it.add_request(i, num_prompt_tokens=rows)
    zeros = np.zeros(n, np.int32)
    step = TargetStep(
        request_ids=range(n),
        num_context=np.array(CONTEXTS, np.int32),
        num_rejected=zeros,
        num_sampled=zeros + 1,
        last_sampled=anchors,
        next_prefill=zeros,
    )
    tokens = it.propose(step, np.concatenate([case["features"] for case in cases]))
    hidden, logits = (np.asarray(it.last_taps[name])[:n] for name in ("hidden", "logits"))
    assert hidden.dtype == dtype and np.array_equal(tokens, logits.argmax(-1)), (hidden.dtype, tokens)
    return [{"hidden": h, "logits": x} for h, x in zip(hidden, logits, strict=True)]


def draft_oracle(folder: Path) -> Drafts:
    """The same step by the numpy oracle."""
    cases, anchors, K = read_cases(folder)
    raw = json.loads((folder / "config.json").read_text())
    config, n, rows = parse_draft_config(raw), len(cases), sum(CONTEXTS)
    features = np.concatenate([case["features"] for case in cases]).reshape(rows, len(config.target_layer_ids), -1)
    states = np.full((max(config.hidden_state_indices) + 1, rows, features.shape[-1]), np.nan)
    for i, index in enumerate(config.hidden_state_indices):
        states[index] = features[:, i]
    width, zeros, g = MAX_MODEL_LEN // PAGE, np.zeros(n, int), config.geometry
    pages = 1 + np.arange(n * width).reshape(n, width)
    step = oracle64.Step(zeros, np.array(CONTEXTS), zeros, zeros + 1, anchors, zeros, np.arange(n), pages, states)
    out = oracle64.run(
        raw,
        {name: value for name, value in cases[0].items() if name != "features"},
        step,
        np.zeros((g.num_layers, 2, 1 + n * width, PAGE, g.num_kv_heads, g.head_dim)),
        num_reqs=n,
        context_rows=rows,
        page_size=PAGE,
        max_model_len=MAX_MODEL_LEN,
        num_speculative_tokens=K,
    )
    return [{name: out[name][i] for name in ("hidden", "logits")} for i in range(n)]


def draft_jax64(folders: list[Path]) -> None:
    """What the process with 64-bit JAX does: drafts into files beside the cases."""
    for folder in folders:
        for i, values in enumerate(draft("jax_dflash", folder, "float64")):
            save_file(values, folder / f"{i}.jax64.safetensors")


def draft_ours(folder: Path) -> dict[str, dict[str, Drafts]]:
    """By precision and implementation."""
    jax64 = [load_file(folder / f"{i}.jax64.safetensors") for i in range(len(CONTEXTS))]
    one = {"JAX": draft("jax_dflash", folder, "float32"), "PyTorch": draft("torch_ref", folder, "float32")}
    two = {"JAX": jax64, "PyTorch": draft("torch_ref", folder, "float64"), "numpy": draft_oracle(folder)}
    return {"float32": one, "float64": two, "pure64": two}


def judge(theirs: dict[str, np.ndarray], ours: dict[str, dict[str, Drafts]], request: int) -> list[Row]:
    """One request: public answers `<package>.<run>.<value>` against ours, by run and implementation."""
    rows, top2 = [], np.partition(ours["float64"]["numpy"][request]["logits"], -2, axis=-1)[:, -2:]
    for package, run in sorted({tuple(name.split(".")[:2]) for name in theirs}):
        for name, drafts in ours[run].items():
            pairs = {k: (x.astype(np.float64), theirs[f"{package}.{run}.{k}"]) for k, x in drafts[request].items()}
            sigma = np.sqrt(np.mean(np.subtract(*pairs["logits"]) ** 2, axis=-1))
            decided = top2[:, 1] - top2[:, 0] > SIGMAS * sigma
            equal = decided & (pairs["logits"][0].argmax(-1) == pairs["logits"][1].argmax(-1))
            error = max(relative_rmse(a, b.astype(np.float64)) for a, b in pairs.values())
            error = error if np.isfinite(error) else MAX_ERROR
            rows.append(Row(package, run, name, error, int(equal.sum()), int(decided.sum()), equal.size))
    return rows


def table(rows: list[Row]) -> Table:
    """The worst of all cases, for a person."""
    view = Table(title="Relative RMS distance from public packages, worst case", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("package", "run", "JAX", "PyTorch", "numpy", "limit", "equal", "undecided"):
        view.add_column(heading, justify="left" if heading in ("package", "run") else "right")
    for package, run in sorted({(row.package, row.run) for row in rows}):
        group = [row for row in rows if (row.package, row.run) == (package, run)]
        errors = [max((row.error for row in group if row.ours == name), default=None) for name in OURS]
        cells = ["-" if error is None else f"{error:.1e}" for error in errors]
        equal, decided, tokens = (sum(getattr(row, name) for row in group) for name in ("equal", "decided", "tokens"))
        view.add_row(package, run, *cells, f"{LIMITS[run]:.0e}", f"{equal}/{decided}", str(tokens - decided))
    return view


def compare(folders: list[Path]) -> tuple[list[Row], dict]:
    """Our drafts of every folder against the public ones in it: all rows, and the JSON document."""
    rows, packages, skipped, faults = [], {}, [], []
    for folder in folders:
        ours = draft_ours(folder)
        for i, num_context in enumerate(CONTEXTS):
            case = f"{folder.name} context {num_context}"
            with safe_open(folder / f"{i}.public.safetensors", "np") as handle:
                theirs = {name: handle.get_tensor(name) for name in handle.keys()}
                meta = {name: json.loads(value) for name, value in handle.metadata().items()}
            packages |= meta["packages"]
            skipped += [f"{case}: {name}: {why}" for name, why in meta["skipped"].items()]
            for row in judge(theirs, ours, i):
                rows.append(row)
                if not row.error <= LIMITS[row.run] or row.equal < row.decided:
                    what = f"{row.error:.1e} (limit {LIMITS[row.run]:.0e}), {row.equal} of {row.decided} decided tokens"
                    faults.append(f"{case}: {row.package} {row.run} against {row.ours}: {what}")
    worst: dict[str, float] = {}
    for row in rows:
        key = f"{row.package}.{row.run}"
        worst[key] = max(worst.get(key, 0.0), float(f"{row.error:.2e}"))
    document = {
        "job": "oracles",
        "ok": not faults and not skipped,
        "packages": packages,
        "cases": len(folders) * len(CONTEXTS),
        "worst": worst,
        "tokens": {name: sum(getattr(row, name) for row in rows) for name in ("equal", "decided", "tokens")},
        "skipped": skipped,
        "faults": faults[:20],
    }
    return rows, document


def run_public(venv: Path, folders: list[Path]) -> str | None:
    """Every case of the folders in the other environment; why it cannot run, if so."""
    stems = [folder / str(i) for folder in folders for i in range(len(CONTEXTS))]
    pairs = [f"{stem}.{kind}.safetensors" for stem in stems for kind in ("case", "public")]
    command = [venv / "bin/python", "-W", "ignore", Path(__file__).with_name("public_models.py"), *pairs]
    try:
        status = subprocess.run(command, stdout=sys.stderr).returncode
    except OSError as error:
        return f"{venv} cannot run the public packages: {error}"
    return f"{venv} cannot run the public packages: exit code {status}, see stderr" if status else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--venv", type=Path, help="an environment of constraints/oracles.txt")
    parser.add_argument("--jax64", type=Path, nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.jax64 is not None:
        draft_jax64(options.jax64)
        return 0
    if options.venv is None:
        parser.error("pass --venv DIR")
    with tempfile.TemporaryDirectory() as scratch:
        for name, *model in models():
            write_model(Path(scratch) / name, *model)
        folders = sorted(Path(scratch).iterdir())
        if reason := run_public(options.venv, folders):
            print(json.dumps({"job": "oracles", "ok": False, "faults": [reason]}))
            return 125
        again = [sys.executable, "-m", "parity_tests.oracles.agreement", "--jax64", *map(str, folders)]
        subprocess.run(again, cwd=ROOT, env=os.environ | {"JAX_ENABLE_X64": "1"}, check=True)
        rows, document = compare(folders)
    console = Console()
    console.print(table(rows))
    for line in document["skipped"] + document["faults"]:
        console.print(line, markup=False, highlight=False)
    print(json.dumps(document))
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
