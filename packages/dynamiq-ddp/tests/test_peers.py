"""Real processes that train with the hook, of which one is killed, stopped, late or lies in mid backward."""

import json
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

PROGRAM = Path(__file__).parent / "programs" / "peers.py"
TIMEOUT = 3.0
REPEATS = 6
VICTIM = 1


@pytest.fixture(scope="module")
def survivors(run_program):
    """What the survivors of each fault report, by rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = [sys.executable, str(PROGRAM), str(store.port), str(TIMEOUT), str(REPEATS)]
    status, out, err = run_program(words, timeout=200)
    assert status == 0, err[-5000:]
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("fault", ["kill", "stop", "late", "short", "header"])
def test_every_survivor_is_told_and_can_go_on(fault, survivors):
    found = [result for result in survivors if result["fault"] == fault]
    assert sorted(result["rank"] for result in found) == [0, 2]
    for result in found:
        assert result["error"] == "CommunicationError", result
        assert VICTIM in result["peers"], result
        assert f"rank {VICTIM}" in result["message"], result
        assert result["step"] == 2, result
        assert f"step 2, bucket {result['bucket']}" in result["message"], result
        assert result["seconds"] < 2 * TIMEOUT, result
        assert result["left_behind"] == [0, 0], result
        assert result["goes_on"], result
        if fault == "header":
            assert "step 3 instead of 2" in result["message"], result
