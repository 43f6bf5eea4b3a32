"""Who holds which samples: every kind of split, by its name in an experiment file."""

from kinfolk.data.partition.base import (
    Labels,
    Split,
    SplitKind,
    class_counts,
    exchange,
    generator,
)
from kinfolk.data.partition.clusters import Iid, LabelSwap, Rotation, rotate
from kinfolk.data.partition.common import with_common_test
from kinfolk.data.partition.newcomers import set_apart
from kinfolk.data.partition.skew import Classes, Dirichlet, Pathological
from kinfolk.data.partition.tasks import Alpha, Shards, constant_predictor_line, tuning_clients
from kinfolk.data.partition.turns import Rotate, turned
from kinfolk.data.partition.users import ByUser

SPLITS: dict[str, type[SplitKind]] = {
    "iid": Iid,
    "rotation": Rotation,
    "label-swap": LabelSwap,
    "dirichlet": Dirichlet,
    "pathological": Pathological,
    "classes": Classes,
    "shards": Shards,
    "alpha": Alpha,
    "by-user": ByUser,
}

__all__ = [
    "SPLITS",
    "Alpha",
    "ByUser",
    "Classes",
    "Dirichlet",
    "Iid",
    "LabelSwap",
    "Labels",
    "Pathological",
    "Rotate",
    "Rotation",
    "Shards",
    "Split",
    "SplitKind",
    "class_counts",
    "constant_predictor_line",
    "exchange",
    "generator",
    "rotate",
    "set_apart",
    "tuning_clients",
    "turned",
    "with_common_test",
]
