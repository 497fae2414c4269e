"""The public DFlash implementations agree with ours, where their environment has been made."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parity_tests.oracles import agreement

ROOT = Path(__file__).parents[1]
VENV = ROOT / ".venv-oracles"


def test_an_environment_that_cannot_run_is_not_agreement(tmp_path, capsys):
    """Would catch: a job that is green because nothing was there to disagree with."""
    assert agreement.main(["--venv", str(tmp_path)]) == 125
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ok"] is False


@pytest.mark.skipif(not VENV.is_dir(), reason="the public packages have an environment of their own; run make oracles")
def test_public_implementations_agree():
    """Would catch: a drafter that agrees with its own mirror and oracle and with nobody else's."""
    command = [sys.executable, "-m", "parity_tests.oracles.agreement", "--venv", str(VENV)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["ok"] and document["cases"] == 12 and {"dflash", "speculators"} <= document["packages"].keys()
