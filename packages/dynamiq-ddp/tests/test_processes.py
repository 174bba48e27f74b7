"""Three real processes, started once by torchrun: what needs torch's default process group."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "training.py"
SIZE = 3


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={SIZE}"]
    command = [*launcher, str(PROGRAM), str(tmp_path_factory.mktemp("store") / "second")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env.pop("TRITON_INTERPRET", None)  # as on the machine of a user
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env, check=False)
    assert run.returncode == 0, run.stderr[-6000:]
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == SIZE, run.stdout + run.stderr[-3000:]
    return lines


def test_used_before_there_is_a_process_group(found):
    assert all("init_process_group" in rank["before"] for rank in found)


def test_made_before_there_is_a_process_group(found):
    assert [rank["made_early"] for rank in found] == [2.0] * SIZE


def test_goes_on_with_the_next_default_group(found):
    assert [rank["after_another_init"] for rank in found] == [3.0] * SIZE


def test_no_group_means_the_default_group(found):
    for schedule in ("ring", "butterfly"):
        assert len({bits for rank in found for bits in rank["group_none_or_world"][0][schedule]}) == 1


def test_without_a_gpu_the_fastest_backend_for_cpus_runs_and_is_named(found):
    fastest = "numba" if importlib.util.find_spec("numba") else "reference"
    assert [rank["group_none_or_world"][1] for rank in found] == [[fastest]] * SIZE


def test_a_subgroup_averages_over_its_members(found):
    assert sorted(rank["subgroup"] for rank in found) == [[0.0] * 4, [3.0] * 4, [3.0] * 4]


def test_join_with_uneven_inputs(found):
    assert sorted(rank["join"] for rank in found) == [[[3.0], 3], [[3.0, 2.0], 3], [[3.0, 2.0, 1.0], 3]]


def test_a_compiled_model_calls_the_hook_once(found):
    assert [rank["compiled"][:2] for rank in found] == [[2.0, [0]]] * SIZE


def test_a_compiled_model_comes_to_the_same_bits_over_several_buckets(found):
    for rank in found:
        (eager, calls), (compiled, again) = rank["compiled"][2:]
        assert len(set(calls)) > 1
        assert again == calls
        assert compiled == eager == found[0]["compiled"][2][0]


def test_a_copy_of_a_model_has_no_hook_until_it_is_registered_again(found):
    assert [rank["copied"] for rank in found] == [[1, 1, 3.0, 2, 3.0]] * SIZE


def test_fsdp_is_told_that_the_hook_is_for_ddp(found):
    for sharded, whole in (rank["fsdp"] for rank in found):
        assert "cannot average a Tensor with Tensor; allowed: a bucket of DistributedDataParallel" in sharded
        assert "cannot average a Tensor; allowed: a bucket of DistributedDataParallel" in whole


def test_join_divides_by_the_size_of_the_group_whatever_it_is_told_as_with_every_hook(found):
    assert sorted(rank["divisor_of_join"] for rank in found) == [[3.0, 1.0] * 2, [3.0] * 2, [3.0] * 2]


def test_a_compiler_mode_without_buckets_is_refused_on_every_rank(found):
    assert all("cannot average a tuple" in rank["without_buckets"] for rank in found)
    assert all("python_reducer" in rank["without_buckets"] for rank in found)


def test_a_resumed_run_continues_bit_for_bit(found):
    whole = found[0]["resumed"][0]
    assert [rank["resumed"] for rank in found] == [[whole, [0, whole], [3, whole]]] * SIZE


def test_a_pickled_state_falls_back_to_the_default_group_with_a_warning(found):
    for grad, messages in (rank["rebound"] for rank in found):
        assert grad == 2.0
        assert any("process_group is not kept" in message for message in messages)


def test_first_traffic_of_a_group(found):
    assert all(rank["first_traffic"] == found[0]["first_traffic"] for rank in found)
    assert found[0]["first_traffic"] == pytest.approx([1.0] * 5, rel=0.2)
