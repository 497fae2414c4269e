"""Files from strangers: each ends in one clear InputError; nothing runs, nothing large is allocated."""

import json
import os
import pickle
import random
import struct
import tracemalloc
from pathlib import Path

import pytest

from jax_dflash import inspect as verb
from jax_dflash.config import InputError, describe_draft_config, load_draft_config, parse_draft_config
from jax_dflash.names import match_draft
from jax_dflash.stored import read_header
from parity_tests.forms import CONFIGS, muse, speculators, tensors, write, zlab


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "drafter", zlab(), tensors(zlab()))


def refuse(f, folder, *parts):
    """Both frameworks refuse, in one line and with little memory."""
    tracemalloc.start()
    with pytest.raises(InputError) as caught:
        f.weights.load_draft_tensors(folder, parse_draft_config(zlab()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000 and peak < 1 << 20
    for part in (str(folder), *parts):
        assert part in message, message


def with_header(file: Path, change) -> None:
    """Rewrite a safetensors file with a changed header before the same data."""
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = change(json.loads(data[8 : 8 + size]))
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + size :])


def edit(name: str, **changes):
    def change(header):
        header[name] |= changes
        return header

    return change


TEN_GIB = {"dtype": "BF16", "shape": [5 * 2**30], "data_offsets": [0, 10 * 2**30]}
UNREADABLE = "model.safetensors: not a readable safetensors file"


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.write_bytes(file.read_bytes()[:-3]),
        lambda file: file.write_bytes(file.read_bytes()[:100]),
        lambda file: file.write_bytes(file.read_bytes()[:5]),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(struct.pack("<Q", 1 << 40) + file.read_bytes()[8:]),
        lambda file: file.write_bytes(struct.pack("<Q", 1 << 26) + file.read_bytes()[8:]),
        lambda file: file.write_bytes(b"\xff" * 64),
        lambda file: with_header(file, lambda header: b"{" * 5000),
        lambda file: with_header(file, lambda header: b"[1, 2]"),
        lambda file: with_header(file, lambda header: header | {"fc.weight": None}),
        lambda file: with_header(file, edit("norm.weight", dtype="F32")),
        lambda file: with_header(file, edit("norm.weight", dtype="OBJECT")),
        lambda file: with_header(file, edit("norm.weight", data_offsets=[0, 32])),
        lambda file: with_header(file, edit("norm.weight", data_offsets=[-8, 24])),
        lambda file: with_header(file, edit("norm.weight", data_offsets=[10**15, 10**15 + 32])),
        lambda file: with_header(file, edit("norm.weight", shape=[2**62, 2**62])),
        lambda file: with_header(file, edit("norm.weight", shape=[-16])),
        lambda file: with_header(file, edit("fc.weight", shape=[10 * 2**30 // 2])),
        lambda file: with_header(file, lambda header: {"fc.weight": TEN_GIB}),
        lambda file: file.write_bytes(json.dumps({"fc.weight": [1.0]}).encode()),
    ],
)
def test_files_that_are_not_safetensors(f, change, folder):
    """Truncated, a header longer than its file, another dtype, overlapping offsets, 10 GB declared in a small file."""
    change(folder / "model.safetensors")
    refuse(f, folder, UNREADABLE)


def test_a_name_twice_in_a_header(f, folder):
    """Two readers of one header that take different entries."""

    def change(header):
        text = json.dumps(header)
        entry = json.dumps(header["norm.weight"])
        return (text[:-1] + f', "norm.weight": {entry}}}').encode()

    with_header(folder / "model.safetensors", change)
    refuse(f, folder, UNREADABLE)


class Bomb:
    """Leaves a file behind when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "mask_embedding.pt"])
def test_pickles_are_never_opened(f, name, folder):
    """Code that runs because a checkpoint was loaded."""
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    trap = folder / "executed"
    (folder / name).write_bytes(pickle.dumps(Bomb(trap)))
    refuse(f, folder, {"pytorch_model.bin": "pytorch_model.bin is a pickle, which is never opened"}.get(name, name))
    assert not trap.exists()


def test_links_out_of_the_folder(f, folder, tmp_path):
    """A checkpoint that reads files of whoever opens it."""
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    refuse(f, folder, "a link out of its folder")
    (folder / "config.json").rename(tmp_path / "elsewhere.json")
    (folder / "config.json").symlink_to("../elsewhere.json")
    with pytest.raises(InputError, match="config.json: a link out of its folder"):
        load_draft_config(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")
    with pytest.raises(InputError, match="config.json: a link that leads nowhere|config.json: not readable"):
        load_draft_config(folder)


def test_links_of_a_hub_cache(f, folder, tmp_path):
    """huggingface_hub's cache, which is nothing but links, refused like any other link."""
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(i))
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    assert f.drafter.load_drafter(snapshot)[0] == parse_draft_config(zlab())


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", 3, "sub/a", "..", ".", "", "a\0", "a" * 5000])
def test_an_index_that_leads_out_of_the_folder(f, name, folder):
    """Paths joined as they come."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": name}}))
    refuse(f, folder, "model.safetensors.index.json: weight_map names", "expected files of the same folder")


@pytest.mark.parametrize(
    "text, part",
    [
        ("{", "not readable as JSON"),
        ("[" * 100_000, "not readable as JSON"),
        ('{"a":' * 100_000, "not readable as JSON"),
        ('{"hidden_size": 1' + "0" * 5000 + "}", "not readable as JSON"),
        ("\x00", "not readable as JSON"),
        ("[]", "expected a JSON object, found list"),
        ("{}", "is missing"),
    ],
)
def test_configurations_that_are_not(text, part, folder):
    """A traceback for a broken config.json."""
    (folder / "config.json").write_text(text)
    with pytest.raises(InputError, match=part) as caught:
        load_draft_config(folder)
    assert "\n" not in str(caught.value)


def test_configurations_that_are_no_files(folder):
    """Waiting for ever on a pipe, or reading gigabytes of JSON."""
    path = folder / "config.json"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(InputError, match="not a file"):
        load_draft_config(folder)
    path.unlink()
    with path.open("wb") as handle:
        handle.truncate(1 << 40)
    with pytest.raises(InputError, match="expected a JSON file of at most"):
        load_draft_config(folder)


VALUES = (
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**63, -(2**70), 10**400, 0.0, -0.5, 0.5, 1e308, 5e-324, float("nan"),
    float("inf"), "", "full_attention", "sliding_attention", "yarn", "default", "a\nb", [], [0], [1, 1], [-1], [[1]], {},
    {"a": 1}, {"rope_type": "yarn"}, {"rope_type": "yarn", "factor": 4}, {"full_attention": {"rope_theta": 1}}, [None],
    {"mask_token_id": 1}, ["full_attention"] * 3, ["sliding_attention"] * 3,
)  # fmt: skip
KEYS = (
    "dflash_config", "rope_parameters", "rope_scaling", "layer_types", "use_sliding_window", "sliding_window", "is_causal",
    "transformer_layer_config", "use_swa", "swa_window_size", "mscale", "mscale_all_dim", "attention_factor", "factor",
    "partial_rotary_factor", "max_window_layers", "draft_vocab_size", "quantization_config", "target_layer_ids", "causal",
    "aux_hidden_state_layer_ids", "model_type", "num_target_layers", "beta_fast", "original_max_position_embeddings",
)  # fmt: skip


def mutate(rng: random.Random, raw: dict) -> dict:
    """One to four keys, at any depth, deleted, replaced or added."""
    raw = json.loads(json.dumps(raw))
    for _ in range(rng.randint(1, 4)):
        at = raw
        while (inner := [value for value in at.values() if isinstance(value, dict)]) and rng.random() < 0.6:
            at = rng.choice(inner)
        keys = list(at)
        key = rng.choice(keys) if keys and rng.random() < 0.7 else rng.choice(KEYS)
        if rng.random() < 0.2:
            at.pop(key, None)
        else:
            at[key] = rng.choice(VALUES)
    return raw


def test_fuzzed_configurations():
    """6,000 mutated configurations: a record or an InputError of one line, nothing else; inspect's document is JSON."""
    rng = random.Random(20)
    sources, outcomes = [zlab(), speculators(), muse(), *CONFIGS.values()], {"record": 0, "refused": 0}
    for i in range(6000):
        config, reason = describe_draft_config(mutate(rng, sources[i % len(sources)]), "c")
        outcomes["record" if reason is None else "refused"] += 1
        if reason is None:
            assert config is not None and len(config.layers) == config.geometry.num_layers <= 1000
            if i % 4 == 0:
                json.dumps(verb.record(config), allow_nan=False)
        else:
            assert "\n" not in reason and len(reason) < 1000, reason
    assert min(outcomes.values()) > 1000, outcomes


def test_fuzzed_headers(folder):
    """4,000 mutated safetensors files: the table of tensors or an InputError of one line, nothing else."""
    rng, file, config = random.Random(21), folder / "model.safetensors", parse_draft_config(zlab())
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header, outcomes = data[8 : 8 + size], {"read": 0, "refused": 0}
    tokens = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"-", b"0", b"9" * 20, b"\0", b"\xff", b"null", b"I8", b"F64"]
    for _ in range(4000):
        mutated, length = bytearray(header), None
        for _ in range(rng.randint(1, 3)):
            at, kind = rng.randrange(len(mutated)), rng.random()
            if kind < 0.4:
                mutated[at] = rng.randrange(256)
            elif kind < 0.7:
                mutated[at : at + rng.randint(0, 4)] = rng.choice(tokens)
            elif kind < 0.9:  # change a digit, which keeps the header readable
                digits = [j for j, byte in enumerate(mutated) if 48 <= byte < 58]
                mutated[rng.choice(digits)] = rng.randrange(48, 58)
            else:
                length = rng.choice([0, 1, size - 1, size + 1, 2**31, 2**63, 2**64 - 1])
        body = data[8 + size :] if rng.random() < 0.9 else data[8 + size : -rng.randint(1, 64)]
        file.write_bytes(struct.pack("<Q", len(mutated) if length is None else length) + bytes(mutated) + body)
        try:
            read_header(file)
            match_draft(folder, config).checked()
            outcomes["read"] += 1
        except InputError as error:
            assert "\n" not in str(error) and len(str(error)) < 2000
            outcomes["refused"] += 1
    assert outcomes["refused"] > 1000, outcomes
