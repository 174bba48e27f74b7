"""Parameters that are averaged without compression, in buckets that they share with others."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynamiq_core import ConfigError, DynamiQ
from dynamiq_core.baselines import BF16
from dynamiq_ddp import DynamiQState, dynamiq_hook, simulate
from dynamiq_ddp.exempt import Exemption, Ranges


def flat(parameter):
    return parameter.dim() <= 1


def of(*shapes):
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes]


def test_ranges_follow_the_parameters():
    a, b, c, d, e = of((3, 4), (5,), (0,), (2,), (2, 2))
    assert Exemption(None).ranges(23, (a, b, c, d, e)) == Ranges((23,), (False,))
    assert Exemption([]).ranges(23, (a, b, c, d, e)) == Ranges((23,), (False,))
    assert Exemption(flat).ranges(23, (a, b, c, d, e)) == Ranges((12, 7, 4), (False, True, False))
    assert Exemption({a, e}).ranges(23, (a, b, c, d, e)) == Ranges((12, 7, 4), (True, False, True))
    assert Exemption(iter([a, b, c, d, e])).ranges(23, (a, b, c, d, e)) == Ranges((23,), (True,))
    assert Exemption([a]).ranges(4, of((2, 2))) == Ranges((4,), (False,))  # equal in shape and value, but another one


def test_splitting_and_joining_are_each_others_inverse():
    x = torch.arange(25.0)
    for ranges in (Ranges((12, 7, 6), (False, True, False)), Ranges((1, 23, 1), (True, False, True))):
        rest, exempt = ranges.split(x)
        assert len(rest) == ranges.compressed
        assert sorted(torch.cat((rest, exempt)).tolist()) == x.tolist()
        out = torch.full((25,), torch.nan)
        ranges.join(rest, exempt, out)
        assert torch.equal(out, x)


@pytest.mark.parametrize("bad", [3, "norm", torch.ones(3), [torch.ones(3), "norm"], [None]])
def test_what_is_no_parameter_is_refused(bad):
    with pytest.raises(ConfigError, match="exempt cannot"):
        DynamiQState(exempt=bad)


@pytest.mark.parametrize("schedule", ["ring", "butterfly"])
@pytest.mark.parametrize("n", [2, 4])
def test_exempt_slices_are_exact_and_the_others_as_if_alone(n, schedule, states, random_rows, same_bits):
    parameters = of((60, 70), (300,), (20, 50), (9,))
    rows = random_rows(n, sum(p.numel() for p in parameters))
    exempt = torch.cat([torch.full((p.numel(),), p.dim() <= 1) for p in parameters])

    def work(state, rank):
        mean = state.begin(rows[rank].clone(), index=0, parameters=parameters).wait()
        return mean, state.stats()

    settings = {"codec": None, "backend": "numba", "schedule": schedule}
    results = states(n, work, **settings, exempt=flat, min_compress_numel=1000)
    exact = rows.double().mean(dim=0)
    for mean, stats in results:
        assert same_bits(mean, results[0][0])
        assert float((mean[exempt] - exact[exempt]).abs().max()) <= 2.0**-21
        assert same_bits(mean[~exempt], simulate(rows[:, ~exempt], codec=DynamiQ(), schedule=schedule).mean)
        assert stats.all_reduces == 2
    # What is left after the exempt ones is below the threshold: everything is exact, in one all-reduce.
    for mean, stats in states(n, work, **settings, exempt=lambda p: p.dim() > 1, min_compress_numel=1000):
        assert float((mean - exact).abs().max()) <= 2.0**-21
        assert stats.all_reduces == 1


def test_an_exempt_part_keeps_no_residual(states):
    parameters = of((60, 70), (300,))

    def work(state, rank):
        for _ in range(2):
            state.begin(torch.randn(4500), index=0, parameters=parameters).wait()
        return [list(b["values"].shape) + b["shapes"] for b in state.state_dict()["residuals"]["buckets"].values()]

    settings = {"codec": None, "backend": "numba", "error_feedback": True, "exempt": [parameters[1]]}
    assert states(2, work, **settings) == [[[4200, [60, 70]]]] * 2


def test_exemptions_under_ddp(ddp_ranks):
    """Biases exactly, weights coarsely; before and after DDP rebuilds its buckets, and after a change."""

    def work(group):
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.1)
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.0005)
        state = DynamiQState(bits=2.0, process_group=group, min_compress_numel=0)
        state.exempt = [p for name, p in model.named_parameters() if "bias" in name]
        ddp.register_comm_hook(state, dynamiq_hook)
        seen = []
        for number in range(4):
            if number == 3:
                state.exempt = lambda parameter: parameter.dim() > 1
            x = torch.linspace(0.1, 1.7, 16).view(2, 8) ** (1 + group.rank())
            with ddp.no_sync():
                ddp.zero_grad()
                ddp(x).square().sum().backward()
                own = [p.grad.clone() for p in ddp.parameters()]
            ddp.zero_grad()
            ddp(x).square().sum().backward()
            seen.append((own, [p.grad.clone() for p in ddp.parameters()]))
        return seen

    first, second = ddp_ranks(2, work)
    for number, ((mine, found), (theirs, other)) in enumerate(zip(first, second, strict=True)):
        for a, b, mean, same in zip(mine, theirs, found, other, strict=True):
            assert torch.equal(mean, same)
            exact = (a + b) / 2
            exempt = (a.dim() > 1) == (number == 3)
            assert torch.allclose(mean, exact, rtol=1e-6) == exempt


def test_parameters_of_another_model_are_noticed(states):
    mine, other = of((60, 70)), of((60, 70))

    def work(state, rank):
        for _ in range(3):
            state.begin(torch.ones(4200), index=0, parameters=mine).wait()

    with pytest.warns(UserWarning, match=r"1 exempt parameters, of shapes \(60, 70\), were in no bucket") as caught:
        states(2, work, exempt=[*mine, *other])
    assert len([w for w in caught if "in no bucket" in str(w.message)]) == 2  # once on each rank
    states(2, work, exempt=[*mine, other[0].requires_grad_(False)])


def test_a_function_is_asked_once_for_each_parameter(states):
    parameters, asked = of((60, 70), (300,)), []

    def moody(parameter):
        asked.append(tuple(parameter.shape))
        return len(asked) % 2 == 0

    def work(state, rank):
        return [state.begin(torch.ones(4500), index=0, parameters=parameters).wait() for _ in range(3)]

    states(1, work, exempt=moody)
    assert asked == [(60, 70), (300,)]


@pytest.mark.parametrize("copying", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_a_copy_asks_again_for_what_it_cannot_keep(copying):
    (parameter,) = of((5000,))
    kept = copying(DynamiQState(exempt=flat))
    assert kept.exempt is flat
    assert copying(DynamiQState()).exempt is None
    for exempt in ([parameter], lambda p: True):
        twin = copying(DynamiQState(exempt=exempt))
        again = copying(twin)
        for state in (twin, again):
            assert state.exempt is None
            with pytest.raises(ConfigError, match=r"set state\.exempt again"):
                state._exemption.ranges(5000, [parameter])
        twin.exempt = [parameter]
        assert twin._exemption.ranges(5000, [parameter]) == Ranges((5000,), (True,))


def test_a_whole_bucket_that_is_exempt(states):
    parameters = of((5000,))
    value = float(torch.tensor(1.0) + 2.0**-20)  # more than bfloat16 holds

    def work(state, rank):
        return state.begin(torch.full((5000,), value), index=0, parameters=parameters).wait()

    assert all((mean == value).all() for mean in states(3, work, codec=BF16(), exempt=flat))
