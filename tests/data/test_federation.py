import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from conftest import make_federation
from kinfolk import Federation, UserError
from kinfolk.data.formats import Dataset, Samples
from kinfolk.data.partition import Split


def pairs(sizes: list[int], shift: float = 0.0) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(np.full((s, 2), i + shift, dtype=np.float32), np.arange(s) % 3) for i, s in enumerate(sizes)]


def dataset(count: int = 12) -> Dataset:
    x = np.arange(count * 9, dtype=np.uint8).reshape(count, 1, 3, 3)
    y = np.arange(count, dtype=np.int64) % 4
    return Dataset("toy", Samples(x[:8], y[:8]), Samples(x[8:], y[8:]), 4)


def test_samples_lie_flat_and_each_clients_in_one_run() -> None:
    data = Federation.from_arrays(pairs([3, 1, 4]), pairs([2, 2, 2], 10))
    assert data.clients == 3
    assert data.classes == 3
    assert data.input_shape == (2,)
    assert data.train.starts.tolist() == [0, 3, 4]
    assert data.train.sizes.tolist() == [3, 1, 4]
    assert data.train.x[:, 0].tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert data.class_counts().tolist() == [[1, 1, 1], [1, 0, 0], [2, 1, 1]]


def test_a_shard_holds_just_its_clients() -> None:
    part = Federation.from_arrays(pairs([3, 1, 4]), pairs([2, 1, 2], 10), clusters=[0, 1, 1]).select(
        torch.tensor([2, 0])
    )
    assert part.train.x[:, 0].tolist() == [2, 2, 2, 2, 0, 0, 0]
    assert part.train.starts.tolist() == [0, 4]
    assert part.test.x[:, 0].tolist() == [12, 12, 10, 10]
    assert part.clusters is not None
    assert part.clusters.tolist() == [1, 0]


def test_pooling_hands_all_training_samples_to_client_zero() -> None:
    pooled = make_federation([3, 4, 5]).pooled()
    assert pooled.train.sizes.tolist() == [12, 0, 0]
    assert pooled.test.sizes.tolist() == [7, 7, 7]


def test_datasets_and_arrays_give_the_same_federation() -> None:
    arrays = pairs([3, 2])
    sets = [TensorDataset(torch.from_numpy(x), torch.from_numpy(y)) for x, y in arrays]
    a, b = Federation.from_arrays(arrays, arrays), Federation.from_datasets(sets, sets)
    assert torch.equal(a.train.x, b.train.x)
    assert torch.equal(a.test.y, b.test.y)


def test_a_split_turns_images_and_swaps_labels_for_train_and_test_alike() -> None:
    split = Split(
        train=[np.array([0, 1]), np.array([2])],
        test=[np.array([8]), np.array([9, 10])],
        clusters=np.array([0, 1]),
        quarter_turns=np.array([0, 1]),
        swaps=np.array([[0, 1], [2, 3]]),
        notes=["a note"],
    )
    toy = dataset()
    data = Federation.from_split(toy, split, "unit")
    image = torch.from_numpy(toy.train.x[2, 0].astype(np.float32) / 255)
    torch.testing.assert_close(data.train.x[2, 0], torch.rot90(image, 1))
    torch.testing.assert_close(data.train.x[0, 0], torch.from_numpy(toy.train.x[0, 0].astype(np.float32) / 255))
    assert data.train.y.tolist() == [1, 0, 3]  # 0 and 1 exchanged; 2 became 3
    assert data.test.y.tolist() == [1, 1, 3]  # samples 8, 9, 10 have labels 0, 1, 2
    assert data.notes == ["a note"]


@pytest.mark.parametrize("channels", [1, 3])
def test_standardised_training_pixels_have_mean_zero_and_deviation_one_per_channel(channels: int) -> None:
    x = np.random.default_rng(0).integers(0, 255, (50, channels, 4, 4)).astype(np.uint8)
    x[:, 0] //= 3
    y = np.zeros(50, dtype=np.int64)
    toy = Dataset("toy", Samples(x[:40], y[:40]), Samples(x[40:], y[40:]), 1)
    split = Split([np.arange(40)], [np.arange(40, 50)], None, None, None, [])
    data = Federation.from_split(toy, split, "standardize")
    assert data.train.x.mean(dim=(0, 2, 3)).abs().max() < 1e-5
    assert (data.train.x.std(dim=(0, 2, 3), correction=0) - 1).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ([(np.zeros((2, 2)), np.zeros(3))], "inputs but"),
        ([(np.zeros((2, 2)), np.zeros(2)), (np.zeros((2, 3)), np.zeros(2))], r"client 1 train: inputs of shape \[3\]"),
        ([(np.full((2, 2), np.nan), np.zeros(2))], "NaN"),
        ([(np.zeros((2, 2)), np.zeros(2)), (np.zeros((0, 2)), np.zeros(0))], "client 1 has no training samples"),
        ([(np.zeros((2, 2)), np.array([0, -1]))], "labels run from -1"),
    ],
)
def test_data_that_do_not_fit_are_refused_in_one_line(train: list[tuple[np.ndarray, np.ndarray]], words: str) -> None:
    test = [(np.zeros((1, x.shape[1])), np.zeros(1)) for x, _ in train]
    with pytest.raises(UserError, match=words) as error:
        Federation.from_arrays(train, test)
    assert "\n" not in str(error.value)


def test_counts_of_clients_must_agree() -> None:
    with pytest.raises(UserError, match="2 training sets and 1 test sets"):
        Federation.from_arrays(pairs([1, 1]), pairs([1]))
    with pytest.raises(UserError, match="3 clusters for 2 clients"):
        Federation.from_arrays(pairs([1, 1]), pairs([1, 1]), clusters=[0, 1, 2])
