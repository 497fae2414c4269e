"""Checkpoints by name, from a local folder laid out as the hub's cache; the network is never asked."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from jax_dflash.cli import ASSETS

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path):
    """The shipped drafter as `org/drafter` at main and at tag v1, files by link as the hub's client lays them."""
    repo = tmp_path / "models--org--drafter"
    for folder in ("blobs", "refs", f"snapshots/{SHA}"):
        (repo / folder).mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(ASSETS / "builtin" / "drafter" / name, repo / "blobs" / name)
        (repo / "snapshots" / SHA / name).symlink_to(f"../../blobs/{name}")
    for ref in ("main", "v1"):
        (repo / "refs" / ref).write_text(SHA)
    return tmp_path


def inspect(cache, *args, code=0):
    environ = os.environ | {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "jax_dflash", "inspect", *args, "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr[-1000:]
    return done


@pytest.mark.parametrize("revision", [[], ["--revision", "v1"], ["--revision", SHA]])
def test_a_name_is_found_in_the_cache(cache, revision):
    """A name taken for a folder, a revision that is not passed on, or the cache's links refused as links out of it."""
    found = json.loads(inspect(cache, "org/drafter", *revision).stdout.splitlines()[-1])
    assert found["block_size"] == 8 and found["hidden_state_indices"] == [2, 5, 7, 9, 12] and found["refused"] is None
    assert found["weights"]["num_bytes"] > 10**6


def test_what_cannot_be_reached_is_one_line(cache):
    """A traceback of the client's for a misspelt name, or minutes of asking a network that is not there."""
    for args, start in (
        (["org/other"], "error: org/other: no such folder, and not to be had from the hub ("),
        (["org/drafter", "--revision", "v2"], "error: org/drafter at revision v2: no such folder, and not to be had"),
    ):
        said = inspect(cache, *args, code=2).stderr
        assert said.startswith(start) and said.count("\n") == 1, said


def test_a_folder_has_no_revisions(cache):
    """A revision that is silently ignored."""
    said = inspect(cache, str(ASSETS / "builtin" / "drafter"), "--revision", "v1", code=2).stderr
    assert said.endswith("a folder has no revisions; pass org/name, or no --revision\n")
