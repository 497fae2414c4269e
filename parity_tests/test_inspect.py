"""`inspect`: its document, its exit code, its floors, and that it loads no framework."""

import json
import math
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jax_dflash import cli, roofline
from jax_dflash.config import parse_draft_config
from jax_dflash.stored import read_header
from parity_tests.forms import CONFIGS, REFUSED, muse, shrunk, speculators, tensors, write, zlab
from parity_tests.test_cli import run

CONFIG_DIR = cli.ASSETS / "configs"
BUILTIN = cli.ASSETS / "builtin"
KEYS = (
    "hidden_state_indices mask_token_id block_size num_speculative_tokens num_layers hidden_size target_hidden_size "
    "num_heads num_kv_heads head_dim intermediate_size rms_norm_eps rope layers vocab_size draft_vocab_size dtype "
    "num_parameters num_bytes format refused"
).split()
ROPE_KEYS = {"type", "theta", "factor", "original_max_position_embeddings", "attention_factor", "rotary_dim"}


def inspect(monkeypatch, capsys, *arguments) -> tuple[int, dict, str]:
    monkeypatch.setattr(sys, "argv", ["jax-dflash", "inspect", *map(str, arguments), "--json"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1
    return stop.value.code or 0, json.loads(out), err


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configurations(name, monkeypatch, capsys):
    """A key that users' scripts read, gone or null; a refused drafter that is not described, or exits 0."""
    code, document, err = inspect(monkeypatch, capsys, CONFIG_DIR / f"{name}.json")
    assert set(KEYS) <= set(document)
    assert set(document["rope"]) == ROPE_KEYS and set(document["layers"][0]) == {"window", "causal"}
    assert len(document["layers"]) == document["num_layers"]
    assert document["num_speculative_tokens"] == document["block_size"] - 1
    assert document["num_bytes"] == 2 * document["num_parameters"]
    if name == REFUSED:
        assert code == 2 and "convolutions" in document["refused"] and document["refused"] in err
    else:
        assert (code, document["refused"], err) == (0, None, "")


def test_literal_document(monkeypatch, capsys):
    """A value under another's key."""
    _, document, _ = inspect(monkeypatch, capsys, CONFIG_DIR / "qwen3.6-27b-dflash-yarn-upload.json")
    expected = {
        "format": "z-lab", "hidden_state_indices": [2, 17, 32, 47, 62], "mask_token_id": 248070, "block_size": 16,
        "num_speculative_tokens": 15, "num_layers": 5, "hidden_size": 5120, "target_hidden_size": 5120, "num_heads": 32,
        "num_kv_heads": 8, "head_dim": 128, "intermediate_size": 17408, "rms_norm_eps": 1e-6, "vocab_size": 248320,
        "draft_vocab_size": None, "dtype": "bfloat16", "num_parameters": 1_730_213_120, "num_bytes": 3_460_426_240,
        "layers": [{"window": 2048, "causal": True}] * 4 + [{"window": None, "causal": False}], "refused": None,
        "pool_bytes_per_token": 20480, "weights": None,
    }  # fmt: skip
    assert {key: document[key] for key in expected} == expected
    attention_factor = document["rope"].pop("attention_factor")
    assert math.isclose(attention_factor, 1.4158883083, abs_tol=1e-10)
    rope = {"type": "yarn", "theta": 1e7, "factor": 64.0, "original_max_position_embeddings": 4096, "rotary_dim": 128}
    assert document["rope"] == rope


def test_yarn_option(monkeypatch, capsys):
    """An option that is taken and not passed on."""
    path = CONFIG_DIR / "kimi-k2.5-dflash.json"
    factors = [
        inspect(monkeypatch, capsys, path, *options)[1]["rope"]["attention_factor"]
        for options in ([], ["--yarn-attention", "ignore-mscale"])
    ]
    assert factors == [1.0, pytest.approx(1.4158883083, abs=1e-10)]
    code, out, err = run(monkeypatch, capsys, "inspect", path, "--yarn-attention", "no", "--json")
    assert code == 2 and "yarn_attention='no'" in json.loads(out)["refused"] and "yarn_attention='no'" in err


@pytest.mark.parametrize("path", ["configs/qwen3.6-27b-dflash-yarn-upload.json", "builtin/drafter"])
def test_no_framework_is_loaded(path):
    """Seconds of imports, and a GPU taken, to print a configuration; weights are checked without them too."""
    code = f"""
import sys
from jax_dflash import cli
sys.argv = ["jax-dflash", "inspect", {str(cli.ASSETS / path)!r}]
try:
    cli.main()
finally:
    print([m for m in ("jax", "torch", "flax", "ml_dtypes") if m in sys.modules])
"""
    root = Path(__file__).parents[1]
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    lines = out.stdout.splitlines()
    assert lines[-1] == "[]" and max(map(len, lines)) <= 80


def test_the_shipped_pair(monkeypatch, capsys):
    """Weights that are there and not read; a pair that belongs together refused."""
    code, document, _ = inspect(monkeypatch, capsys, BUILTIN / "drafter", "--target", BUILTIN / "target")
    assert code == 0 and document["refused"] is None
    weights = document["weights"]
    assert (weights["num_tensors"], weights["num_bytes"]) == (25, document["num_bytes"])
    assert [weights[key] for key in ("own_tables", "missing", "unclaimed", "not_finite", "problems")] == [[]] * 5


def test_a_target_of_another_width(monkeypatch, capsys):
    """A pair that cannot run, found only when it does."""
    code, document, _ = inspect(
        monkeypatch, capsys, CONFIG_DIR / "qwen3-4b-dflash-b16.json", "--target", BUILTIN / "target"
    )
    assert code == 2 and "target features of width 2560" in document["refused"] and document["hidden_size"] == 2560


def test_a_target_completes_the_floors(monkeypatch, capsys, tmp_path):
    """A floor without an LM head although the target says how big it is."""
    folder = write(tmp_path / "drafter", muse(), None)
    target = write(tmp_path / "target", zlab(num_hidden_layers=5, layer_types=None), None)
    rows = [
        inspect(monkeypatch, capsys, folder, *options)[1]["floor_of"]["lm_head_rows"]
        for options in ([], ["--target", target])
    ]
    assert rows == [None, 40]


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != REFUSED])
def test_published_forms_with_weights(name, monkeypatch, capsys, tmp_path):
    """A form whose tensors only the loaders understand."""
    raw = shrunk(CONFIGS[name])
    values = tensors(raw)
    code, document, _ = inspect(monkeypatch, capsys, write(tmp_path / "drafter", raw, values))
    assert (code, document["refused"], document["weights"]["num_tensors"]) == (0, None, len(values))
    tables = ("embed_tokens.weight", "lm_head.weight", "d2t")
    assert document["weights"]["own_tables"] == [table for table in tables if table in values]
    assert document["num_parameters"] == sum(value.size for key, value in values.items() if key not in tables)


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_values_that_are_not_finite(kind, value, monkeypatch, capsys, tmp_path):
    """A broken upload that shows as NaN drafts; or the largest finite value taken for infinity."""
    dtype = np.dtype(getattr(ml_dtypes, kind, kind))
    values = {name: x.astype(dtype) for name, x in tensors(zlab()).items()}
    values["layers.2.mlp.down_proj.weight"][-1, -1] = ml_dtypes.finfo(dtype).max
    values["layers.1.mlp.up_proj.weight"][0, 3] = ml_dtypes.finfo(dtype).tiny
    code, document, _ = inspect(monkeypatch, capsys, write(tmp_path / "drafter", zlab(), values))
    assert (code, document["weights"]["not_finite"]) == (0, [])
    values["layers.2.mlp.down_proj.weight"][-1, -1] = value
    code, document, _ = inspect(monkeypatch, capsys, write(tmp_path / "drafter", zlab(), values))
    assert (code, document["weights"]["not_finite"]) == (2, ["layers.2.mlp.down_proj.weight"])
    assert "1 tensor(s) hold values that are not finite: layers.2.mlp.down_proj.weight" in document["refused"]


def test_pieces_of_a_tensor(tmp_path):
    """A last piece, or the values at a border, that no check reads."""
    for at in (0, 7, 8, 31, 32, 34):
        values = np.zeros(35, np.float32)
        values[at] = np.nan
        save_file({"x": values}, tmp_path / "x.safetensors")
        (stored,) = read_header(tmp_path / "x.safetensors")
        assert not stored.all_finite(piece=32)
        save_file({"x": np.zeros(35, np.float32), "y": values}, tmp_path / "x.safetensors")
        assert [tensor.all_finite(piece=32) for tensor in read_header(tmp_path / "x.safetensors")] == [True, False]


def test_every_fault_is_listed(monkeypatch, capsys, tmp_path):
    """A list that ends at its first fault."""
    values = tensors(zlab()) | {"layers.0.self_attn.g_proj.weight": np.ones((2, 2), np.float32)}
    values = {name: value for name, value in values.items() if name not in ("norm.weight", "hidden_norm.weight")}
    values["fc.weight"] = values["fc.weight"].T
    code, document, err = inspect(monkeypatch, capsys, write(tmp_path / "drafter", zlab(), values))
    weights = document["weights"]
    assert code == 2 and weights["missing"] == ["hidden_norm.weight", "norm.weight"]
    assert weights["unclaimed"] == ["layers.0.self_attn.g_proj.weight"] and len(weights["problems"]) == 3
    assert "fc.weight has shape [32, 16]" in document["refused"] and document["refused"] in err


@pytest.mark.parametrize(
    "raw, part",
    [
        (zlab(block_size=...), "key 'block_size' is missing"),
        (zlab(rope_scaling={"rope_type": "llama3"}), "key 'rope_scaling.rope_type' is 'llama3'"),
        (zlab(dflash_config={"attention_sink_bias": True}), "attention_sink_bias"),
        (speculators(sample_from_anchor=True), "sample_from_anchor"),
    ],
)
def test_refused_configurations(raw, part, monkeypatch, capsys, tmp_path):
    """A refusal without a document, or an exit code 0 or 1."""
    code, document, err = inspect(monkeypatch, capsys, write(tmp_path / "drafter", raw, None))
    assert code == 2 and part in document["refused"] and err == f"error: {document['refused']}\n"
    assert set(KEYS) <= set(document)
    code, out, err = run(monkeypatch, capsys, "inspect", tmp_path / "drafter")
    assert code == 2 and "REFUSED" in out and part in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere"], "nowhere: no such directory"),
        ([CONFIG_DIR], "config.json: no such file"),
        (
            [BUILTIN / "drafter", "--num-speculative-tokens", 8],
            "--num-speculative-tokens 8: this drafter's blocks of 8",
        ),
        ([BUILTIN / "drafter", "--max-num-seqs", 0], "--max-num-seqs 0"),
        ([BUILTIN / "drafter", "--bandwidth", 0], "--bandwidth 0"),
        ([BUILTIN / "drafter" / "model.safetensors"], "not readable as JSON"),
    ],
)
def test_arguments_that_cannot_be(arguments, message, monkeypatch, capsys):
    """A traceback."""
    code, out, err = run(monkeypatch, capsys, "inspect", *arguments)
    assert (code, out) == (2, "") and message in err


def test_human_output(monkeypatch, capsys):
    """A figure that only the JSON has, or lines wider than a terminal."""
    for name, parts in {
        "qwen3.6-27b-dflash": [
            "window 2048",
            "causal",
            "both ways",
            "2, 17, 32, 47, 62",
            "1,730,213,120",
            "20,480 bytes",
        ],
        "kimi-k2.5-dflash": ["YaRN 64 x 4096", "attention factor 1 (mscale)"],
        "speculators-qwen3-8b-dflash": ["speculators form", "32,000 of them"],
        "muse-glimmer-30b-assistant": ["the target's", "without the LM head"],
    }.items():
        monkeypatch.setattr(sys, "argv", ["jax-dflash", "inspect", str(CONFIG_DIR / f"{name}.json")])
        with pytest.raises(SystemExit):
            cli.main()
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 80
        for part in parts:
            assert part in out, out


def draft(name: str):
    return parse_draft_config(CONFIGS[name])


@pytest.mark.parametrize(
    "name, gigabytes, microseconds", [("qwen3-4b-dflash-b16", 1.85, 412), ("qwen3-8b-dflash-b16", 3.34, 743)]
)
def test_floor_of_a_step(name, gigabytes, microseconds):
    """A weight counted twice or not at all: the known floors of one request at 4.5 TB/s."""
    operations = roofline.draft_step(draft(name), num_reqs=1, num_speculative_tokens=15, length=0)
    num_bytes, _ = roofline.total(operations)
    assert round(num_bytes / 1e9, 2) == gigabytes
    assert round(roofline.floor_seconds(operations, 4.5e12, 790e12) * 1e6) == microseconds


def test_bytes_and_flops_of_a_small_step():
    """Each term of the formulas, by hand: L=3, D=16, 4 and 2 heads of 8, F=24, 2 taps, V=40, n=2, K=3, 5 tokens."""
    operations = roofline.draft_step(parse_draft_config(zlab()), num_reqs=2, num_speculative_tokens=3, length=5)
    found = {operation.name: (operation.num_bytes, operation.flops) for operation in operations}
    assert found == {
        "fc": (2 * (16 * 32 + 8 * 32), 2 * 8 * 16 * 32),
        "context K/V": (2 * 3 * 32 * 16 + 2 * 8 * 3 * 32, 2 * 8 * 3 * 32 * 16),
        "embedding": (2 * 3 * 16, 0),
        "projections": (2 * (3 * 2 * 32 * 16 + 3 * (2 * 16 + 2 * 8) + 2 * 16), 2 * 8 * 3 * (2 * 32 + 32) * 16),
        "MLP": (2 * 3 * 3 * 16 * 24, 2 * 8 * 3 * 3 * 16 * 24),
        "attention": (2 * 3 * (5 + 4 + 4) * 2 * 32, 4 * 2 * 3 * 4 * 9 * 32),
        "lm_head": (2 * 40 * 16, 2 * 6 * 40 * 16),
    }


@pytest.mark.parametrize(
    "window, causal, context, seen",
    [
        (4, True, 3, [4, 4, 4, 4]),
        (4, False, 3, [7, 6, 5, 4]),
        (None, False, 7, [11, 11, 11, 11]),
        (None, True, 7, [8, 9, 10, 11]),
        (100, True, 7, [8, 9, 10, 11]),
        (1, False, 0, [1, 1, 1, 1]),
    ],
)
def test_visible_keys(window, causal, context, seen):
    """C32, C33: the keys that a block of 4 rows after 7 tokens sees, and a window that reads all the context."""
    assert roofline.visible_keys(window, causal, 7, 4) == (context if window != 100 else 7, sum(seen))


def test_pool_does_not_depend_on_requests():
    """C52: 5 layers, 4 KV heads of 128, bfloat16: 10,240 bytes a token."""
    raw = zlab(num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4, head_dim=128, layer_types=None)
    assert roofline.pool_bytes_per_token(parse_draft_config(raw)) == 10240


def test_head_of_a_reduced_vocabulary():
    """The whole vocabulary's head in the floor of a drafter that has 12 rows of it; Muse's is not known."""
    heads = [
        {operation.name: operation for operation in roofline.draft_step(
            parse_draft_config(raw), num_reqs=1, num_speculative_tokens=3, length=0)}.get("lm_head")
        for raw in (speculators(), zlab(), muse())
    ]  # fmt: skip
    assert [head and head.num_bytes for head in heads] == [2 * 12 * 16, 2 * 40 * 16, None]
