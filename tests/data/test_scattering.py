"""Scattering features: against kymatio's own transform and against sums written out, and what they are for."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from kinfolk.data import scattering
from kinfolk.data.scattering import feature_shape, scattered, standardised
from kinfolk.errors import UserError


def images(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def smooth(count: int, side: int, seed: int = 0) -> torch.Tensor:
    """Pictures of low frequencies, as photographs mostly are: [count, 1, side, side]."""
    coarse = images(count, 1, side // 8, side // 8, seed=seed)
    return torch.nn.functional.interpolate(coarse, size=(side, side), mode="bicubic")


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((3, 32, 32), (243, 8, 8)), ((1, 28, 28), (81, 7, 7)), ((1, 8, 8), (81, 2, 2)), ((3, 84, 84), (243, 21, 21))],
)
def test_shapes_are_those_of_the_paper(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert feature_shape(shape) == expected
    assert tuple(scattered(images(2, *shape)).shape) == (2, *expected)


@pytest.mark.parametrize(
    ("scales", "angles", "shape"),
    [(2, 8, (32, 32)), (2, 8, (28, 28)), (2, 8, (29, 35)), (2, 8, (5, 9)), (3, 4, (32, 40)), (1, 8, (16, 16))],
)
def test_equals_kymatio(scales: int, angles: int, shape: tuple[int, int]) -> None:
    frontend = pytest.importorskip("kymatio.scattering2d.frontend.torch_frontend")
    x = images(3, 2, *shape)
    expected = frontend.ScatteringTorch2D(scales, shape, angles)(x).flatten(1, 2)
    assert (scattered(x, scales, angles) - expected).abs().max() < 2e-6


def gabor(side: int, sigma: float, theta: float, frequency: float, slant: float) -> np.ndarray:
    """A wave under a bell, wrapped around a torus: [side, side] complex."""
    at = np.arange(-2 * side, 3 * side)
    u, v = np.meshgrid(at, at, indexing="ij")
    along, across = u * np.cos(theta) + v * np.sin(theta), -u * np.sin(theta) + v * np.cos(theta)
    bell = np.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2)) * slant / (2 * np.pi * sigma**2)
    return (bell * np.exp(1j * frequency * along)).reshape(5, side, 5, side).sum((0, 2))


def convolve(plane: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Circular convolution, one shift of the plane after another."""
    result = np.zeros(plane.shape, complex)
    for a in range(plane.shape[0]):
        for b in range(plane.shape[1]):
            result += kernel[a, b] * np.roll(plane, (a, b), (0, 1))
    return result


def test_equals_convolutions_written_out_in_double_precision() -> None:
    """One path of each order: wavelets as Morlet defined them, no Fourier transform, thinned out only at the end."""
    image = images(1, 1, 16, 16).double().numpy()[0, 0]
    plane = np.pad(image, 4, mode="reflect")
    low = gabor(24, 1.6, 0, 0, 1)

    def morlet(j: int, theta: float) -> np.ndarray:
        sigma, frequency = 0.8 * 2**j, 0.75 * np.pi / 2**j
        wave, bell = gabor(24, sigma, theta, frequency, 0.5), gabor(24, sigma, theta, 0, 0.5)
        return wave - wave.sum() / bell.sum() * bell

    def averaged(values: np.ndarray) -> np.ndarray:
        return convolve(values, low).real[4:20:4, 4:20:4]

    angle = {k: (3 - k) * np.pi / 8 for k in range(8)}
    first = np.abs(convolve(plane, morlet(0, angle[2])))
    second = np.abs(convolve(first, morlet(1, angle[5])))
    found = scattered(torch.from_numpy(image)[None, None].float())[0].numpy()
    assert np.abs(found[0] - averaged(plane)).max() < 1e-4
    assert np.abs(found[1 + 2] - averaged(first)).max() < 1e-4
    # Thinning out by two before the last averaging folds what little lies above the new limit of frequencies.
    assert np.abs(found[1 + 16 + 8 * 2 + 5] - averaged(second)).max() < 2e-3
    assert np.abs(averaged(second)).max() > 0.01


def test_a_constant_image_has_only_its_average() -> None:
    features = scattered(torch.full((1, 1, 32, 32), 0.7))[0]
    assert (features[0] - 0.7).abs().max() < 1e-3
    assert features[1:].abs().max() < 1e-5


def test_sign_and_size_pass_through() -> None:
    x = images(2, 1, 32, 32)
    features, doubled = scattered(x), scattered(-2 * x)
    assert torch.allclose(doubled[:, 1:], 2 * features[:, 1:], atol=1e-6)
    assert torch.allclose(doubled[:, :1], -2 * features[:, :1], atol=1e-6)


def test_a_shift_changes_features_less_than_pixels() -> None:
    x = smooth(16, 32) + 0.2 * images(16, 1, 32, 32, seed=1)
    moved = x.roll(1, -1)
    inside = slice(1, -1)
    features, shifted = (scattered(each)[..., inside, inside] for each in (x, moved))
    of_features = (features - shifted).norm() / features.norm()
    of_pixels = (x - moved).norm() / x.norm()
    assert of_features < 0.6 * of_pixels
    # Two pictures that have nothing in common stay apart.
    assert (features - features.roll(1, 0)).norm() / features.norm() > 2 * of_features


def test_a_quarter_turn_turns_the_angles() -> None:
    x = images(2, 1, 32, 32)
    across = scattered(x.mean(2, keepdim=True).expand_as(x))[:, 1:9].mean((0, 2, 3))
    down = scattered(x.mean(2, keepdim=True).expand_as(x).transpose(2, 3))[:, 1:9].mean((0, 2, 3))
    assert abs(int(across.argmax()) - int(down.argmax())) == 4


def test_energy_is_bounded_and_second_order_matters() -> None:
    """Averaging loses energy and nothing adds any; per pixel, because there are sixteen times fewer."""
    x = images(8, 1, 64, 64)
    energy = scattered(x).square().mean((0, 2, 3))
    whole = x.square().mean()
    assert energy.sum() < whole
    assert energy[17:].sum() > 1e-3 * whole
    a, b = x[:4], x[4:]
    assert (scattered(a) - scattered(b)).square().sum() * 16 < (a - b).square().sum() * 1.2


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_threads_or_company(threads: int) -> None:
    x = images(20, 3, 32, 32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole, again = scattered(x), scattered(x)
        with ThreadPoolExecutor(1) as pool:  # a thread that is made later has the threads it would have had
            assert pool.submit(torch.get_num_threads).result() == torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(whole, again)
    assert torch.equal(whole[:16], scattered(x[:16]))
    assert torch.allclose(whole[3:5], scattered(x[3:5]), atol=1e-6)


def test_colours_are_standardised_and_grey_is_not() -> None:
    x = torch.rand(2, 3, 8, 8)
    assert torch.allclose(standardised(x)[:, 1], (x[:, 1] - 0.456) / 0.224)
    assert torch.equal(standardised(x[:, :1]), x[:, :1])


def test_features_of_nothing_and_of_gradients() -> None:
    assert scattered(torch.zeros(0, 3, 32, 32)).shape == (0, 243, 8, 8)
    assert not scattered(images(1, 1, 8, 8).requires_grad_()).requires_grad


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 3, 4, 32), "needs images of at least 5×5 pixels, these have 4×32"),
        (torch.zeros(2, 64), "needs images"),
        (torch.zeros(2, 1, 8, 8, dtype=torch.uint8), "divide the pixels by 255"),
    ],
)
def test_wrong_inputs_are_refused_in_one_line(x: torch.Tensor, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        scattered(x)
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    scattering._bank.cache_clear()
    monkeypatch.setitem(sys.modules, "kymatio.scattering2d.filter_bank", None)
    with pytest.raises(UserError, match=r"pip install 'kinfolk\[features\]'"):
        scattered(torch.zeros(1, 1, 8, 8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_computes_the_same() -> None:
    x = images(50, 3, 32, 32)
    assert (scattered(x.cuda()).cpu() - scattered(x)).abs().max() < 1e-5
