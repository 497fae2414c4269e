"""The command line on bad input: one clear line on stderr, exit code 2, nothing on stdout."""

import json
import shutil
import sys

import pytest

from jax_dflash import cli


@pytest.fixture
def pair(tmp_path):
    """A copy of the shipped pair to break."""
    return shutil.copytree(cli.ASSETS / "builtin", tmp_path / "pair")


def run(monkeypatch, capsys, *arguments) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["jax-dflash", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def edit(path, **changes):
    raw = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            raw.pop(key)
        else:
            raw[key] = value
    path.write_text(json.dumps(raw))


def no_directory(pair):
    shutil.rmtree(pair / "drafter")
    return "drafter: no such directory; pass a folder with config.json"


def no_weights(pair):
    (pair / "drafter" / "model.safetensors").unlink()
    return "model.safetensors: no such file"


def truncated_weights(pair):
    path = pair / "drafter" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    return "model.safetensors: not a readable safetensors file"


def broken_json(pair):
    (pair / "drafter" / "config.json").write_text("{")
    return "config.json: not readable as JSON"


def no_mask_id(pair):
    edit(pair / "drafter" / "config.json", dflash_config={"target_layer_ids": [1]})
    return "key 'dflash_config.mask_token_id' is missing"


def mask_id_outside(pair):
    edit(pair / "drafter" / "config.json", dflash_config={"target_layer_ids": [1], "mask_token_id": 99999})
    return "mask_token_id=99999 is outside the vocabulary of"


def no_layer_ids(pair):
    edit(pair / "drafter" / "config.json", dflash_config={"mask_token_id": 1})
    return "key 'dflash_config.target_layer_ids' is missing"


def no_block_size(pair):
    edit(pair / "drafter" / "config.json", block_size=None)
    return "key 'block_size' is missing"


def no_rope_theta(pair):
    edit(pair / "drafter" / "config.json", rope_theta=None)
    return "key 'rope_theta' is missing"


def hidden_size_of_neither(pair):
    edit(pair / "drafter" / "config.json", hidden_size=56)
    return "target features of width 56, the target's hidden_size is"


def other_rope(pair):
    edit(pair / "drafter" / "config.json", rope_scaling={"rope_type": "longrope", "factor": 4.0})
    return "key 'rope_scaling.rope_type' is 'longrope'; expected default or yarn"


def other_target(pair):
    edit(pair / "target" / "config.json", model_type="gpt2")
    return "key 'model_type' is 'gpt2'"


BROKEN = [
    no_directory, no_weights, truncated_weights, broken_json, no_mask_id, mask_id_outside, no_layer_ids, no_block_size,
    no_rope_theta, hidden_size_of_neither, other_rope, other_target,
]  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN, ids=lambda fault: fault.__name__)
def test_broken_checkpoints(fault, pair, monkeypatch, capsys):
    """Would catch: a traceback, a guessed default, or exit code 1 for a file that cannot be used."""
    message = fault(pair)
    arguments = ["compare", "--checkpoint", pair / "drafter", "--target", pair / "target", "--device", "cpu"]
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert code == 2
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("error: ") and message in last


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--num-speculative-tokens", 16], "num_speculative_tokens=16: this drafter's blocks of"),
        (["--num-speculative-tokens", 0], "num_speculative_tokens=0: this drafter's blocks of"),
        (["--max-num-seqs", 0], "max_num_seqs=0; pass at least 1"),
        (["--max-model-len", 64], "max_model_len=64 is too small for prompts of 330 tokens"),
        (["--dtype", "float16"], "--dtype 'float16': pass float32 or bfloat16"),
        (["--device", "tpu"], "--device 'tpu': pass cpu or gpu"),
        (["--checkpoint", "somewhere"], "pass --target DIR"),
        (["--out", "no/such/folder/run.json"], "expected a file in a directory that exists"),
    ],
)
def test_arguments_that_cannot_run(arguments, message, monkeypatch, capsys):
    """Would catch: a job that starts and fails late, or that quietly clamps what was asked for."""
    device = [] if "--device" in arguments else ["--device", "cpu"]
    code, out, err = run(monkeypatch, capsys, "compare", *arguments, *device)
    assert (code, out) == (2, "")
    assert message in err.splitlines()[-1]
