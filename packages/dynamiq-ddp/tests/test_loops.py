"""Training loops that people write, with the hook in place: each against what DDP does without one."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dynamiq_core import InputError
from dynamiq_core.baselines import BF16
from dynamiq_ddp import DynamiQState, dynamiq_hook


def wrap(model, group, *, threshold=0, **options):
    """A model with the hook, whose messages are bfloat16, so that small integers arrive exactly."""
    ddp = DistributedDataParallel(model, process_group=group, **options)
    state = DynamiQState(codec=BF16(), process_group=group, min_compress_numel=threshold)
    ddp.register_comm_hook(state, dynamiq_hook)
    return ddp, state


def plain(model, group, **options):
    return DistributedDataParallel(model, process_group=group, **options)


def scalar():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


class Branches(nn.Module):
    """One parameter used everywhere, one on rank 0 only, one nowhere."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.a, self.b, self.c = (nn.Parameter(torch.zeros(())) for _ in range(3))

    def forward(self, x):
        return self.a * x + (self.b * 6 if self.rank == 0 else 0)


@pytest.mark.parametrize("as_view", [False, True])
def test_accumulation_with_no_sync(as_view, ddp_ranks):
    def work(group):
        ddp, _ = wrap(scalar(), group, gradient_as_bucket_view=as_view)
        x, seen = torch.full((1, 1), group.rank() + 1.0), []
        for _ in range(3):
            ddp.zero_grad()
            for sync in (False, True):
                with nullcontext() if sync else ddp.no_sync():
                    ddp(x).sum().backward()
            seen.append(float(ddp.module.weight.grad))
        return seen

    assert ddp_ranks(2, work) == [[3.0] * 3] * 2


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_stay_linked_to_the_buckets(as_view, set_to_none, ddp_ranks):
    def work(group):
        ddp, _ = wrap(nn.Sequential(scalar(), scalar()), group, gradient_as_bucket_view=as_view, bucket_cap_mb=1e-6)
        for parameter in ddp.parameters():
            nn.init.ones_(parameter)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125, momentum=0.5)
        for step in range(5):
            optimizer.zero_grad(set_to_none=set_to_none)
            ddp(torch.full((1, 1), (group.rank() + 1.0) * (step % 2))).sum().backward()
            optimizer.step()
        return [float(parameter.detach()) for parameter in ddp.parameters()]

    results = ddp_ranks(2, work)
    assert results[0] == results[1]
    assert all(torch.tensor(results[0]).isfinite())
    model = nn.Sequential(scalar(), scalar())
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    for step in range(5):
        optimizer.zero_grad()
        model(torch.full((1, 1), 1.5 * (step % 2))).sum().backward()
        optimizer.step()
    assert results[0] == pytest.approx([float(parameter.detach()) for parameter in model.parameters()], rel=0.02)


def test_unused_parameters(ddp_ranks):
    def work(group):
        ddp, _ = wrap(Branches(group.rank()), group, find_unused_parameters=True)
        for _ in range(3):
            ddp.zero_grad(set_to_none=True)
            ddp(torch.tensor(4.0)).backward()
        return [None if p.grad is None else float(p.grad) for p in (ddp.module.a, ddp.module.b, ddp.module.c)]

    assert ddp_ranks(2, work) == [[4.0, 3.0, None]] * 2


def test_static_graph(ddp_ranks):
    def work(group):
        ddp, _ = wrap(scalar(), group, static_graph=True)
        seen = []
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.full((1, 1), group.rank() + 1.0)).sum().backward()
            seen.append(float(ddp.module.weight.grad))
        return seen

    assert ddp_ranks(2, work) == [[1.5] * 3] * 2


def test_static_graph_with_no_sync_fails_as_without_a_hook(ddp_ranks):
    def work(group):
        errors = []
        for make in (plain, lambda *a, **k: wrap(*a, **k)[0]):
            ddp = make(scalar(), group, static_graph=True)
            try:
                for sync in (False, True):
                    with nullcontext() if sync else ddp.no_sync():
                        ddp(torch.ones(1, 1)).sum().backward()
            except RuntimeError as error:
                errors.append(str(error)[:60])
            else:
                errors.append(None)
        return errors

    for stock, ours in ddp_ranks(2, work):
        assert stock == ours


def test_buckets_that_are_rebuilt(ddp_ranks):
    """One bucket of 40 in the first pass, four of 4 and 16 from then on."""
    layouts = {}

    class Watching(BF16):
        def __init__(self, rank):
            self.rank = rank

        def plan(self, statistics, numel, **others):
            layouts.setdefault(self.rank, []).append((others["step"], numel))
            return super().plan(statistics, numel, **others)

    def work(group):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=1e-6)
        state = DynamiQState(codec=Watching(group.rank()), process_group=group, min_compress_numel=0, lanes=1)
        ddp.register_comm_hook(state, dynamiq_hook)
        seen = []
        for _ in range(5):
            ddp.zero_grad()
            ddp(torch.full((1, 4), group.rank() + 1.0)).sum().backward()
            seen.append([p.grad.clone() for p in ddp.parameters()])
        return seen, state.stats()

    (first, stats), (second, _) = ddp_ranks(2, work)
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert [float(x.mean()) for x in a] == [6.0, 4.0, 7.0, 1.0]
    by_step = [[numel for step, numel in layouts[0] if step == number] for number in range(5)]
    assert by_step[0] == [40]
    assert by_step[1:] == [[4, 16, 4, 16]] * 4
    assert layouts[0] == layouts[1]
    # Every bucket was compared once when it was new, and the first one again in every later step.
    assert stats.bytes_agreement == 4 * 16 + 4 * 8


@pytest.mark.parametrize("as_view", [False, True])
def test_error_feedback_across_a_rebuild(as_view, ddp_ranks):
    """What was lost for the bucket of 40 is not given to the buckets of 4 and 16; from then on nothing is lost."""

    def work(group, feedback=True):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=1e-6, gradient_as_bucket_view=as_view)
        state = DynamiQState(bits=3.0, process_group=group, min_compress_numel=0, error_feedback=feedback)
        ddp.register_comm_hook(state, dynamiq_hook)
        seen = []
        for _ in range(5):
            ddp.zero_grad()
            ddp(torch.tensor([[0.3, 0.9, 1.7, 2.2]]) * (group.rank() + 1)).square().sum().backward()
            seen.append([p.grad.clone() for p in ddp.parameters()])
        if not feedback:
            return seen, None
        buckets = state.state_dict()["residuals"]["buckets"]
        return seen, [buckets[index]["values"].clone() for index in sorted(buckets)]

    plain = ddp_ranks(2, lambda group: work(group, feedback=False))[0][0]
    (first, mine), (second, theirs) = ddp_ranks(2, work)
    assert all(torch.equal(x, y) for a, b in zip(first, second, strict=True) for x, y in zip(a, b, strict=True))
    equal = [all(torch.equal(x, y) for x, y in zip(a, b, strict=True)) for a, b in zip(first, plain, strict=True)]
    assert equal[:2] == [True, True]
    assert not any(equal[2:])
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    for factor in (1, 2):
        (model(torch.tensor([[0.3, 0.9, 1.7, 2.2]]) * factor).square().sum() / 2).backward()
    lost = [(a + b) / 2 for a, b in zip(mine, theirs, strict=True)]
    for index, parameter in enumerate(reversed(list(model.parameters()))):  # the order of the buckets
        applied = sum(seen[3 - index] for seen in first[1:])
        assert torch.allclose(applied.flatten() + lost[index], 4 * parameter.grad.flatten(), rtol=1e-5)


def test_empty_and_frozen_parameters(ddp_ranks):
    def work(group):
        class Odd(nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.frozen = scalar(), nn.Parameter(torch.full((3,), 1.0), requires_grad=False)
                self.empty = nn.Parameter(torch.empty(0, 4))

            def forward(self, x):
                return (self.used(x) * self.frozen).sum() + self.empty.sum()

        ddp, _ = wrap(Odd(), group, bucket_cap_mb=1e-6)
        for _ in range(2):
            ddp.zero_grad()
            ddp(torch.full((1, 1), group.rank() + 1.0)).sum().backward()
        return float(ddp.module.used.weight.grad), ddp.module.frozen.grad

    assert ddp_ranks(2, work) == [(4.5, None)] * 2


def test_a_frozen_model_gets_ddps_own_error(ddp_ranks):
    def work(group):
        with pytest.raises(RuntimeError, match="not needed"):
            wrap(scalar().requires_grad_(False), group)
        return True

    assert ddp_ranks(1, work) == [True]


def test_sparse_gradients(ddp_ranks):
    def work(group):
        found = []
        for make in (plain, lambda *a, **k: wrap(*a, **k)[0]):
            model = nn.Sequential(nn.Embedding(10, 2, sparse=True), nn.Linear(2, 1, bias=False))
            nn.init.ones_(model[1].weight)
            ddp = make(model, group)
            for _ in range(2):
                ddp.zero_grad()
                ddp(torch.tensor([group.rank(), 5])).sum().backward()
            grad = model[0].weight.grad
            found.append((grad.is_sparse, grad.to_dense()))
        return found

    for (stock_is, stock), (ours_is, ours) in ddp_ranks(2, work):
        assert stock_is
        assert ours_is
        assert torch.equal(stock, ours)


def test_several_models_with_a_state_each(ddp_ranks):
    def work(group):
        models = [wrap(scalar(), group)[0] for _ in range(2)]
        for _ in range(3):
            x = torch.full((1, 1), group.rank() + 1.0)
            for model in models:
                model.zero_grad()
            (models[0](x) + models[1](3 * x)).sum().backward()
        return [float(model.module.weight.grad) for model in models]

    assert ddp_ranks(2, work) == [[1.5, 4.5]] * 2


def test_several_models_that_share_a_state(ddp_ranks):
    def work(group):
        state = DynamiQState(codec=BF16(), process_group=group, min_compress_numel=0)
        models = []
        for width in (1, 2):
            model = nn.Linear(width, 1, bias=False)
            models.append(DistributedDataParallel(model, process_group=group))
            models[-1].register_comm_hook(state, dynamiq_hook)
        for _ in range(3):
            for model in models:
                model.zero_grad()
                model(torch.full((1, model.module.in_features), group.rank() + 1.0)).sum().backward()
        return [model.module.weight.grad.flatten().tolist() for model in models], state.steps

    assert ddp_ranks(2, work) == [([[1.5], [1.5, 1.5]], 6)] * 2


def test_an_overflow_on_one_rank_makes_all_ranks_skip_the_step(ddp_ranks):
    def work(group):
        model = scalar()
        ddp, _ = wrap(model, group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        weights = []
        for step in range(3):
            optimizer.zero_grad()
            value = torch.inf if step == 1 and group.rank() == 1 else 1.0
            scaler.scale(ddp(torch.full((1, 1), value)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            weights.append(float(model.weight.detach()))
        return weights, scaler.get_scale()

    assert ddp_ranks(2, work) == [([-1.0, -1.0, -2.0], 2.0)] * 2


def test_gradient_clipping_sees_the_mean(ddp_ranks):
    def work(group):
        ddp, _ = wrap(scalar(), group)
        ddp(torch.full((1, 1), 4.0 * group.rank() + 2)).sum().backward()
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        return float(norm), float(ddp.module.weight.grad)

    for norm, grad in ddp_ranks(2, work):
        assert norm == 4.0
        assert grad == pytest.approx(1.0)


def test_an_exception_in_the_backward_pass_does_not_poison_the_state(ddp_ranks):
    class Explosive(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("in the user's own code")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last, self.explode = scalar(), scalar(), True
            nn.init.ones_(self.first.weight)

        def forward(self, x):
            x = self.first(x)
            return self.last(Explosive.apply(x) if self.explode else x)

    def work(group):
        state = DynamiQState(codec=BF16(), process_group=group, min_compress_numel=0)
        model = Model()
        for explode in (True, False):
            ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=1e-6)
            ddp.register_comm_hook(state, dynamiq_hook)
            model.explode = explode
            x = torch.full((1, 1), group.rank() + 1.0)
            if explode:
                with pytest.raises(ArithmeticError, match="own code"):
                    ddp(x).sum().backward()
                model = Model()
            else:
                ddp(x).sum().backward()
        return float(model.last.weight.grad)

    assert ddp_ranks(2, work) == [1.5] * 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_error_under_activation_checkpoints_is_raised_as_itself(reentrant, ddp_ranks):
    """A reentrant checkpoint has a backward pass of its own, which ends before the buckets of the outer one begin."""

    class Failing(BF16):
        def plan(self, statistics, numel, *, bucket, **others):
            if bucket == 2:
                raise InputError("the codec met something odd")
            return super().plan(statistics, numel, bucket=bucket, **others)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Sequential(scalar(), scalar(), scalar()), nn.Sequential(scalar(), scalar())

        def forward(self, x):
            return checkpoint(self.last, self.first(x), use_reentrant=reentrant)

    def work(group):
        ddp = DistributedDataParallel(Model(), process_group=group, bucket_cap_mb=1e-6)
        state = DynamiQState(codec=Failing(), process_group=group, min_compress_numel=0)
        ddp.register_comm_hook(state, dynamiq_hook)
        ddp(torch.ones(1, 1)).sum().backward()  # in one bucket
        with pytest.raises(InputError, match="something odd"):
            ddp(torch.ones(1, 1)).sum().backward()
        return True

    assert ddp_ranks(2, work) == [True] * 2


def test_many_passes_over_a_large_parameter(ddp_ranks):
    def work(group):
        model = nn.Linear(1250, 1000, bias=False)  # 5 MB
        ddp, _ = wrap(model, group)
        x = torch.full((1, 1250), float(group.rank() + 1))
        for step in range(20):
            ddp.zero_grad()
            (ddp(x).sum() * (step % 3 + 1)).backward()
            assert (model.weight.grad == 1.5 * (step % 3 + 1)).all()
        return True

    assert ddp_ranks(2, work) == [True, True]
