"""The noise η: its mean, variance and generator, and the entries that share one value."""

import pytest
import torch
import torch.nn.functional as F

from device import new_generator
from undrop.errors import OptionError
from undrop.noise import NOISES, draw_noise, mask_shape, sigma, structured_dropout

LIKE = torch.empty(0, dtype=torch.float64)


def draw_entries(noise, n, q=0.3, seed=0):
    return draw_noise(noise, (n,), q, like=LIKE, generator=new_generator(seed))


@pytest.mark.parametrize("q", [0.01, 0.3, 0.5, 0.9])
def test_sigma_squared_is_q_over_one_minus_q(q):
    assert sigma(q) ** 2 == pytest.approx(q / (1 - q), rel=1e-14)


@pytest.mark.parametrize("q", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("noise", NOISES)
def test_every_noise_has_mean_zero_and_variance_one(noise, q):
    n = 200_000
    eta = draw_entries(noise, n, q)
    fourth = {"sign": 1.0, "dropout": 1 / (q * (1 - q)) - 3}[noise]
    assert abs(eta.mean()) < 4 / n**0.5
    assert abs(eta.square().mean() - 1) <= 4 * ((fourth - 1) / n) ** 0.5 + 1e-12


@pytest.mark.parametrize("q", [0.1, 0.5, 0.8])
def test_one_plus_sigma_times_dropouts_noise_is_dropouts_mask(q):
    mask = 1 + sigma(q) * draw_entries("dropout", 1000, q)
    kept = torch.full_like(mask, 1 / (1 - q))
    torch.testing.assert_close(mask, torch.where(mask.abs() < 1e-9, 0.0, kept), atol=1e-12, rtol=0)


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dropped_entry_is_zero_in_every_precision(dtype):
    """1 + σ·η is exactly 0 where it drops, and 1/(1 - q) to the rounding of σ·η elsewhere."""
    for q in (k / 100 for k in range(1, 100)):
        noise = draw_noise("dropout", (500,), q, scale=sigma(q), like=torch.empty(0, dtype=dtype))
        h = torch.rand(500, dtype=torch.float64).to(dtype) + 0.5
        dropped = torch.addcmul(h, h, noise) == 0
        assert torch.equal(dropped, noise < 0), q
        kept = noise[~dropped].double()
        ulps = 0.51 if dtype.itemsize == 2 else 2.0
        rounding = ulps * torch.finfo(dtype).eps
        torch.testing.assert_close(
            kept, torch.full_like(kept, q / (1 - q)), rtol=rounding, atol=0.0
        )


@pytest.mark.parametrize("noise", NOISES)
def test_noise_is_multiplied_by_its_scale(noise):
    one, three = (
        draw_noise(noise, (50,), 0.3, scale=scale, like=LIKE, generator=new_generator(0))
        for scale in (1.0, 3.0)
    )
    torch.testing.assert_close(three, 3.0 * one, rtol=1e-14, atol=0.0)


def test_sign_noise_is_plus_or_minus_one():
    assert set(draw_entries("sign", 100).tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize("noise", NOISES)
def test_noise_comes_from_its_generator_alone(noise):
    state = torch.get_rng_state()
    assert torch.equal(draw_entries(noise, 9), draw_entries(noise, 9))
    assert not torch.equal(draw_entries(noise, 9), draw_entries(noise, 9, seed=1))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("noise", NOISES)
def test_noise_has_the_dtype_of_its_activation(noise, dtype):
    assert draw_noise(noise, (2, 3), 0.5, like=torch.empty(1, dtype=dtype)).dtype == dtype


def test_the_error_for_an_unknown_noise_lists_the_noises():
    with pytest.raises(OptionError, match=r"no noise 'uniform': use one of dropout, sign"):
        draw_noise("uniform", (1,), 0.5, like=LIKE)


@pytest.mark.parametrize(
    ("shape", "shared", "expected"),
    [
        ((2, 3, 4), (), (2, 3, 4)),
        ((2, 3, 4), (0,), (1, 3, 4)),
        ((2, 3, 4), (-1, 1), (2, 1, 1)),
        ((), (), ()),
    ],
)
def test_a_mask_has_size_one_along_shared_dimensions(shape, shared, expected):
    assert mask_shape(shape, shared) == expected


def test_structured_dropout_drops_along_shared_dimensions_and_scales():
    h = torch.rand(50, 6, 40) + 1
    ratio = structured_dropout(h, 0.4, shared=(0,)) / h
    assert torch.allclose(ratio, ratio[:1].expand_as(ratio))
    zero = ratio[0] == 0
    torch.testing.assert_close(ratio[0][~zero], torch.full_like(ratio[0][~zero], 1 / 0.6))
    assert abs(zero.double().mean() - 0.4) < 4 * (0.24 / 240) ** 0.5


def test_structured_dropout_without_sharing_equals_torchs_dropout():
    h = torch.randn(7, 5)
    state = torch.get_rng_state()
    ours = structured_dropout(h, 0.3)
    torch.set_rng_state(state)
    torch.testing.assert_close(ours, F.dropout(h, 0.3))


@pytest.mark.parametrize("options", [{"p": 0.0}, {"p": 0.5, "training": False}])
def test_structured_dropout_that_is_off_returns_its_input(options):
    h = torch.randn(3)
    assert structured_dropout(h, **options) is h
