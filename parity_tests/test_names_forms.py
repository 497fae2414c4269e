"""Every published spelling of a drafter's tensors loads to the canonical names bit for bit, in both frameworks."""

import json
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jax_dflash.config import InputError, parse_draft_config
from jax_dflash.names import draft_tensors, vocabulary_tensors
from parity_tests.forms import CONFIGS, REFUSED, SIZES, muse, shrunk, speculators, tensors, write, zlab
from parity_tests.tiny import numpy


def load(f, folder, dtype=None):
    raw = json.loads((folder / "config.json").read_text())
    return f.weights.load_draft_tensors(folder, parse_draft_config(raw), dtype)


def assert_same(loaded: dict, values: dict[str, np.ndarray]):
    """The same names and the same bits; d2t as int32."""
    assert set(loaded) == set(values)
    for name, value in values.items():
        kind = str(loaded[name].dtype).removeprefix("torch.")
        if name == "d2t":
            assert kind == "int32" and numpy(loaded[name]).tolist() == value.tolist()
        else:
            assert kind == str(value.dtype) == "bfloat16"
            bits = numpy(loaded[name]).astype(ml_dtypes.bfloat16).view(np.uint16)
            np.testing.assert_array_equal(bits, value.view(np.uint16), err_msg=name)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != REFUSED])
def test_published_forms(f, name, tmp_path):
    """A published form that does not open: each at a fraction of its widths, with every key it has."""
    raw = shrunk(CONFIGS[name])
    values = tensors(raw)
    assert len(values) >= 11 * len(parse_draft_config(raw).layers) + 3
    assert_same(load(f, write(tmp_path / "drafter", raw, values)), values)


def prefixed(values):
    return {f"model.{name}" if name not in ("lm_head.weight", "d2t") else name: v for name, v in values.items()}


def muse_names(values):
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    return {renamed.get(name, name): value for name, value in values.items()}


def midlayer(values):
    return {name.replace("layers.0.", "midlayer."): value for name, value in values.items()}


def everything(values):
    return prefixed(midlayer(muse_names(values)))


def fused(values):
    """q, k and v in one matrix, and in one vector of biases."""
    values = dict(values)
    for name in [name for name in values if ".q_proj." in name]:
        values[name.replace("q_proj", "qkv_proj")] = np.concatenate(
            [values.pop(name.replace("q_proj", f"{p}_proj")) for p in "qkv"]
        )
    return values


def with_copies(values):
    """What converters leave in a file beside the drafter."""
    D = SIZES["hidden_size"]
    return values | {
        "t2d": np.zeros(SIZES["vocab_size"], bool),
        "verifier_lm_head.weight": np.ones((3, D), np.float32),
        "model.verifier_norm.weight": np.ones(D, np.float32),
    }


@pytest.mark.parametrize("spell", [prefixed, muse_names, midlayer, everything, fused, with_copies])
@pytest.mark.parametrize("form", [zlab, speculators, muse])
def test_spellings(f, form, spell, tmp_path):
    """C15: unexpected or missing keys, or a tensor under another's name."""
    raw = form(attention_bias=True) if form is not speculators else form(nested={"attention_bias": True})
    values = tensors(raw, own=form is not muse)
    assert_same(load(f, write(tmp_path / "drafter", raw, spell(values))), values)


def test_biases():
    """o_proj has a bias too; a bias of the output's width where it is the input's."""
    plain, biased = (draft_tensors(parse_draft_config(zlab(attention_bias=bias))) for bias in (False, True))
    added = {name: shape for name, shape in biased.items() if name not in plain and name.startswith("layers.2.")}
    widths = {"q": (32,), "k": (16,), "v": (16,), "o": (16,)}
    assert added == {f"layers.2.self_attn.{p}_proj.bias": shape for p, shape in widths.items()}
    assert (len(plain), len(biased)) == (3 * 11 + 3, 3 * 15 + 3)


def test_fused_rows(f, tmp_path):
    """C15: heads 4, KV heads 2, head dim 8, hidden 16: rows 32, 16 and 16 in q, k, v order."""
    raw = zlab()
    values = tensors(raw)
    rows = np.arange(64 * 16).reshape(64, 16).astype(ml_dtypes.bfloat16)
    name = "layers.1.self_attn.{}_proj.weight".format
    values |= {name("q"): rows[:32], name("k"): rows[32:48], name("v"): rows[48:]}
    stored = {key: value for key, value in values.items() if key not in map(name, "qkv")} | {name("qkv"): rows}
    assert_same(load(f, write(tmp_path / "drafter", raw, stored)), values)


def test_conversion(f, tmp_path):
    """A float32 load that is not exact, or that turns offsets into floats."""
    raw = speculators()
    values = tensors(raw, own=True)
    loaded = load(f, write(tmp_path / "drafter", raw, values), f.numerics.as_dtype("float32"))
    kinds = {name: str(value.dtype).removeprefix("torch.") for name, value in loaded.items()}
    assert kinds.pop("d2t") == "int32" and set(kinds.values()) == {"float32"}
    np.testing.assert_array_equal(numpy(loaded["lm_head.weight"]), values["lm_head.weight"].astype(np.float64))


def refuse(f, folder, *parts):
    with pytest.raises(InputError) as caught:
        load(f, folder)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000
    for part in (str(folder), *parts):
        assert part in message, message


GATE = np.ones((4, 16), np.float32)


def without(values: dict, part: str) -> dict:
    return {name: value for name, value in values.items() if part not in name}


@pytest.mark.parametrize(
    "change, parts",
    [
        (lambda v: v | fused(v), ["qkv_proj.bias is duplicate, it also stands in", "as layers.0.self_attn.q"]),
        (lambda v: v | {"model.fc.weight": v["fc.weight"]}, ["is duplicate", "fc.weight"]),
        (
            lambda v: without(v, "q_norm"),
            ["3 missing tensor(s): layers.0.self_attn.q_norm"],
        ),
        (
            lambda v: without(v, "hidden_norm.weight"),
            ["1 missing tensor(s): hidden_norm.weight"],
        ),
        (
            lambda v: without(v, "layers.2.self_attn.k_proj.bias"),
            ["layers.2.self_attn.k_proj.bias"],
        ),
        (
            lambda v: v | {"layers.1.self_attn.g_proj.weight": GATE},
            ["layers.1.self_attn.g_proj.weight", "a gate on attention"],
        ),
        (lambda v: v | {"aux_hidden_norms.0.weight": GATE[0]}, ["aux_hidden_norms.0.weight", "norms of the target's"]),
        (lambda v: v | {"layers.0.self_attn.attention_sink_bias": GATE[0]}, ["attention_sink_bias", "sinks"]),
        (lambda v: v | {"layers.0.attention_conv.base_kernel": GATE}, ["attention_conv", "convolutions"]),
        (lambda v: v | {"candidate_selector.predecessor_codebook": GATE}, ["candidate_selector", "selector"]),
        (lambda v: v | {"something.weight": GATE}, ["1 unclaimed tensor(s): something.weight"]),
        (lambda v: v | {"layers.3.self_attn.q_norm.weight": GATE[0]}, ["1 unclaimed tensor(s): layers.3"]),
        (lambda v: v | {"bad\nname\x1b[31m": GATE}, ["unclaimed", "'bad\\nname"]),
        (lambda v: v | {"fc.weight": v["fc.weight"].T}, ["fc.weight has shape [32, 16], expected [16, 32]"]),
        (lambda v: v | {"fc.weight": v["fc.weight"].astype(np.int8)}, ["fc.weight is stored as I8", "quantised"]),
        (lambda v: v | {"embed_tokens.weight": GATE}, ["embed_tokens.weight has shape [4, 16], expected [40, 16]"]),
        (lambda v: v | {"d2t": np.zeros(40, np.int64)}, ["1 unclaimed tensor(s): d2t"]),
    ],
)
def test_refusals(f, change, parts, tmp_path):
    """C06, C15, C17: a tensor dropped, doubled, replaced by ones, read as if it were the weight."""
    raw = zlab(attention_bias=True)
    refuse(f, write(tmp_path / "drafter", raw, change(tensors(raw))), *parts)


@pytest.mark.parametrize(
    "change, parts",
    [
        (lambda v: without(v, "d2t"), ["1 missing tensor(s): d2t"]),
        (lambda v: without(v, "lm_head.weight"), ["1 missing tensor(s): lm_head.weight"]),
        (lambda v: v | {"d2t": v["d2t"].astype(np.float32)}, ["d2t is stored as F32, expected one of ('I64', 'I32')"]),
        (lambda v: v | {"d2t": np.full(12, 40)}, ["d2t holds offsets", "below 40"]),
        (lambda v: v | {"d2t": -np.arange(12)}, ["d2t holds offsets", "not distinct"]),
        (lambda v: v | {"d2t": np.full(12, -1)}, ["d2t holds offsets"]),
        (lambda v: v | {"d2t": np.full(12, 2**63 - 1)}, ["d2t holds offsets"]),
        (
            lambda v: v | {"lm_head.weight": np.ones((40, 16), np.float32)},
            ["lm_head.weight has shape [40, 16], expected [12, 16]"],
        ),
    ],
)
def test_reduced_vocabularies(f, change, parts, tmp_path):
    """C08: a reduced head without its map, or a map that is not one: drafts would be other tokens."""
    raw = speculators()
    refuse(f, write(tmp_path / "drafter", raw, change(tensors(raw))), *parts)


@pytest.mark.parametrize("name", ["mask_embedding", "mask_hidden.weight"])
def test_a_mask_row_among_the_weights(f, name, tmp_path):
    """A vector that no published form has in the weights' own file, dropped, or given a meaning that nobody wrote down."""
    values = tensors(zlab()) | {name: GATE[0]}
    refuse(f, write(tmp_path / "drafter", zlab(), values), f"1 unclaimed tensor(s): {name}", "a mask row of its own")


@pytest.mark.parametrize("form, own", [(zlab, False), (zlab, True), (speculators, False), (speculators, True)])
def test_drafters_load_in_any_spelling(f, form, own, tmp_path):
    """A spelling that only the loader of tensors understands, or a table of its own that the module has no place for."""
    values = tensors(form(), own=own)
    folder = write(tmp_path / "drafter", form(), fused(everything(values)))
    config, drafter = f.drafter.load_drafter(folder)
    assert_same(f.modules.tensors(drafter), values)
    target = {n: f.floats(np.zeros((40, 16))) for n in ("embed_tokens", "lm_head")}
    assert_same(f.drafter.unpack(f.drafter.pack_drafter(drafter, config, **target), config, own=values), values)


MEASURE = """
import sys
from pathlib import Path
from jax_dflash.config import load_draft_config
import importlib
weights = importlib.import_module(f"{sys.argv[1]}.weights")
sizes = {}
def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024
small = weights.load_draft_tensors(sys.argv[3], load_draft_config(sys.argv[3]))
config = load_draft_config(sys.argv[2])
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
values = weights.load_draft_tensors(sys.argv[2], config)
print((status("VmHWM") - before) / sum(value.nbytes for value in values.values()))
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's peak memory counter")
def test_memory_of_loading(f, tmp_path):
    """A file mapped beside the arrays made of it, or all tensors held twice: at most 1.2 times the checkpoint's bytes."""
    raw = speculators(
        draft_vocab_size=4000,
        nested={"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 60000, "head_dim": 64},
    )
    config = parse_draft_config(raw)
    shapes = draft_tensors(config) | {
        name: shape for part in vocabulary_tensors(config) for name, shape in part.items()
    }
    values = {name: np.zeros(shape, ml_dtypes.bfloat16) for name, shape in shapes.items() if name != "d2t"}
    big = write(tmp_path / "big", raw, fused(values) | {"d2t": np.zeros(4000, np.int64)})
    small = write(tmp_path / "small", speculators(), tensors(speculators()))
    command = [sys.executable, "-c", MEASURE, f.package, str(big), str(small)]
    out = subprocess.run(command, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert float(out.stdout) < 1.2, out.stdout


def test_shards_in_another_spelling(f, tmp_path):
    """A spelling understood in one file of several."""
    values = everything(tensors(zlab()))
    folder = write(tmp_path / "drafter", zlab(), None)
    names, weight_map = list(values), {}
    for i, part in enumerate((names[::2], names[1::2])):
        save_file({name: np.ascontiguousarray(values[name]) for name in part}, folder / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same(load(f, folder), tensors(zlab()))
