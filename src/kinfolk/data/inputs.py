"""What the models see of a data set: pixels or features, brought to scale, handed out to the clients."""

from __future__ import annotations

from collections.abc import Callable

from kinfolk.data import feature_cache
from kinfolk.data.federation import Federation
from kinfolk.data.formats import Dataset
from kinfolk.data.normalization import NORMS, check_owners
from kinfolk.data.partition import Split
from kinfolk.errors import UserError


def federation(
    dataset: Dataset,
    split: Split,
    scale: str,
    features: str | None,
    norm: str | None,
    notice: Callable[[str], None] = lambda text: None,
) -> Federation:
    """The clients' samples as the settings `scale`, `features` and `norm` of [data] ask for; `notice` hears of features
    that are about to be computed, which can take minutes."""
    check_owners(norm, split.common, split.newcomers, split.validation)  # before anything that takes minutes
    if features is not None:
        if scale != "standardize":
            raise UserError(f"data.scale = '{scale}' is of pixels: leave it out, or data.features")
        if split.quarter_turns is not None or split.sample_turns is not None:
            raise UserError("data.features is of images as they are: it cannot be used with a split that turns them")
        if not feature_cache.is_cached(dataset):
            name = dataset.name
            notice(f"computing the features of {name}, this once (`kinfolk data features {name}` shows how far it is)")
        dataset, scale = feature_cache.cached(dataset), "unit"  # float values: left as they are
    made = Federation.from_split(dataset, split, scale)
    return made if norm is None else NORMS[norm](made)
