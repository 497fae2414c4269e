"""Checkpoints on disk, read and written by both frameworks; every fault names the file and the tensor."""

import json
from dataclasses import asdict

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jax_dflash.config import InputError, load_draft_config
from jax_dflash.names import draft_tensors
from parity_tests.tiny import DRAFT, FRAMEWORKS, GEOMETRY, numpy, random_values

SHAPES = draft_tensors(DRAFT)


def write_checkpoint(directory, values, file="model.safetensors"):
    g = asdict(GEOMETRY)
    names = {
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
    }
    raw = {names.get(key, key): value for key, value in g.items()} | {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": DRAFT.block_size,
        "dflash_config": {"mask_token_id": DRAFT.mask_token_id, "target_layer_ids": list(DRAFT.target_layer_ids)},
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(values, directory / file)


@pytest.fixture
def values():
    return {name: value.astype(ml_dtypes.bfloat16) for name, value in random_values(SHAPES).items()}


def bits(x) -> np.ndarray:
    return numpy(x).astype(ml_dtypes.bfloat16).view(np.uint16)


def test_loads_bit_for_bit_what_was_stored(f, values, tmp_path):
    """A transpose, a rename, or a round trip through another dtype."""
    write_checkpoint(tmp_path, values)
    config, drafter = f.drafter.load_drafter(tmp_path)
    assert config == load_draft_config(tmp_path)
    assert (config.geometry, config.target_layer_ids, config.block_size) == (GEOMETRY, (0, 2, 4), 7)
    tree = f.modules.tensors(drafter)
    assert set(tree) == set(SHAPES)
    for name, value in values.items():
        assert str(tree[name].dtype).removeprefix("torch.") == "bfloat16"
        np.testing.assert_array_equal(bits(tree[name]), value.view(np.uint16), err_msg=name)


def test_converts_on_request(f, values, tmp_path):
    """A float32 load that stays bfloat16, or that is not exact."""
    write_checkpoint(tmp_path, values)
    tree = f.modules.tensors(f.drafter.load_drafter(tmp_path, f.numerics.as_dtype("float32"))[1])
    assert {str(value.dtype).removeprefix("torch.") for value in tree.values()} == {"float32"}
    np.testing.assert_array_equal(numpy(tree["fc.weight"]), values["fc.weight"].astype(np.float64))


def test_each_framework_reads_what_the_other_wrote(values, tmp_path):
    """A file only its own writer can read, and a partial file left behind."""
    for writer, reader in (("jax", "torch"), ("torch", "jax")):
        write, read = FRAMEWORKS[writer], FRAMEWORKS[reader]
        directory = tmp_path / writer
        directory.mkdir()
        write.weights.save_tensors(directory, {name: write.floats(value, "bfloat16") for name, value in values.items()})
        assert [path.name for path in directory.iterdir()] == ["model.safetensors"]
        stored = load_file(directory / "model.safetensors")
        loaded = read.weights.load_tensors(directory, SHAPES)
        for name, value in values.items():
            np.testing.assert_array_equal(stored[name].view(np.uint16), value.view(np.uint16), err_msg=name)
            np.testing.assert_array_equal(bits(loaded[name]), value.view(np.uint16), err_msg=name)


def refuse(f, directory, *parts):
    with pytest.raises(InputError) as caught:
        f.weights.load_tensors(directory, SHAPES)
    message = str(caught.value)
    assert "\n" not in message
    for part in (str(directory), *parts):
        assert part in message, message


def test_missing_tensor(f, values, tmp_path):
    """A default of ones for a norm that the file lacks."""
    del values["hidden_norm.weight"]
    write_checkpoint(tmp_path, values)
    refuse(f, tmp_path, "1 missing tensor(s): hidden_norm.weight")


def test_unclaimed_tensor(f, values, tmp_path):
    """A gate or bias that changes the function, dropped in silence."""
    values["layers.0.self_attn.g_proj.weight"] = values["fc.weight"]
    write_checkpoint(tmp_path, values)
    refuse(f, tmp_path, "1 unclaimed tensor(s): layers.0.self_attn.g_proj.weight")


def test_misshaped_tensor(f, values, tmp_path):
    """A transposed matrix that reshapes or broadcasts."""
    values["fc.weight"] = np.ascontiguousarray(values["fc.weight"].T)
    write_checkpoint(tmp_path, values)
    refuse(f, tmp_path, "fc.weight has shape [69, 23], expected [23, 69]")


def write_shards(directory, *shards):
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}.safetensors"
        write_checkpoint(directory, shard, file)
        weight_map |= dict.fromkeys(shard, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_load_as_one(f, values, tmp_path):
    """A reader of the first file only."""
    names = list(values)
    write_shards(tmp_path, {name: values[name] for name in names[:7]}, {name: values[name] for name in names[7:]})
    assert set(f.weights.load_tensors(tmp_path, SHAPES)) == set(SHAPES)


def test_duplicate_tensor(f, values, tmp_path):
    """Two shards that disagree, the last one winning."""
    write_shards(tmp_path, values, {"norm.weight": values["norm.weight"]})
    refuse(f, tmp_path, "model-00002.safetensors", "norm.weight is duplicate", "model-00001.safetensors")


def test_truncated_file(f, values, tmp_path):
    """An interrupted download as a traceback."""
    write_checkpoint(tmp_path, values)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    refuse(f, tmp_path, "model.safetensors: not a readable safetensors file")


def test_integer_tensor(f, values, tmp_path):
    """A quantised weight read as if it were the weight, its scale dropped."""
    values["layers.1.mlp.up_proj.weight"] = np.ones(SHAPES["layers.1.mlp.up_proj.weight"], np.int8)
    write_checkpoint(tmp_path, values)
    refuse(f, tmp_path, "layers.1.mlp.up_proj.weight is stored as I8")
