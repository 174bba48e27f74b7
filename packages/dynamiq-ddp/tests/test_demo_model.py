"""The demo's model and recipe."""

from __future__ import annotations

import math

import pytest
import torch

from dynamiq_core.errors import ConfigError
from dynamiq_ddp.demo.model import GPT, GPTConfig, angles, rotate
from dynamiq_ddp.demo.recipe import Recipe

TINY = GPTConfig(width=32, layers=2, heads=2, context=16)


def awake(model: GPT) -> GPT:
    """Give the blocks, which start as the identity, something to do."""
    for name, parameter in model.named_parameters():
        if name.endswith(("project.weight", "contract.weight")):
            torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(1))
    return model


def test_size_of_the_default_model() -> None:
    assert 3_000_000 <= sum(parameter.numel() for parameter in GPT().parameters()) <= 5_000_000


def test_untrained_model_knows_nothing() -> None:
    text = torch.randint(256, (8, 17), generator=torch.Generator().manual_seed(0))
    loss = GPT(TINY)(text[:, :-1], text[:, 1:])
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_loss_is_the_mean_cross_entropy_of_the_logits() -> None:
    text = torch.randint(256, (3, 9), generator=torch.Generator().manual_seed(0))
    model = awake(GPT(TINY))
    picked = model(text[:, :-1]).log_softmax(-1).gather(-1, text[:, 1:, None])
    torch.testing.assert_close(model(text[:, :-1], text[:, 1:]), -picked.mean())


def test_no_byte_sees_a_later_one() -> None:
    model = awake(GPT(TINY))
    text = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = text.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    before, after = model(text)[0], model(changed)[0]
    torch.testing.assert_close(before[:9], after[:9])
    assert (before[9:] - after[9:]).abs().amax(dim=-1).gt(1e-3).all()


def test_order_of_the_bytes_matters() -> None:
    # Without positions, one layer's attention over a permuted past would give the last byte the same prediction.
    model = awake(GPT(GPTConfig(width=32, layers=1, heads=2, context=16)))
    text = torch.arange(16)[None]
    swapped = text[:, [1, 0, *range(2, 16)]]
    assert (model(text)[0, -1] - model(swapped)[0, -1]).abs().max() > 1e-3


def test_rotation_makes_scores_a_function_of_distance() -> None:
    query, key = torch.randn(2, 8, generator=torch.Generator().manual_seed(0)).double()
    rotation = angles(12, 8).double()
    scores = rotate(query.expand(12, 8), rotation) @ rotate(key.expand(12, 8), rotation).T
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores[0, 0], query @ key)
    assert scores[0].std() > 0.1


def test_parameters_follow_from_the_seed_alone() -> None:
    state = torch.get_rng_state()
    first, second, other = (torch.nn.utils.parameters_to_vector(GPT(TINY, seed=s).parameters()) for s in (3, 3, 4))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_learning_rate_warms_up_and_decays_to_zero() -> None:
    recipe = Recipe(steps=200, warmup=20)
    rates = [recipe.rate(step) for step in range(201)]
    assert rates[0] == pytest.approx(1 / 20)
    assert max(rates) == rates[19]
    assert rates[:20] == sorted(rates[:20])
    assert rates[19:] == sorted(rates[19:], reverse=True)
    assert rates[200] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("name", "value"), [("steps", 0), ("steps", -3), ("seed", -1)])
def test_recipe_names_a_bad_value(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is {value}, must be"):
        Recipe(**{name: value})
