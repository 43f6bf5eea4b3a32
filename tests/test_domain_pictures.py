"""What FedCG's domains look like: what a run keeps of them, how it is read, and the picture of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from PIL import Image

import kinfolk
from conftest import tiny_experiment
from kinfolk import UserError, pictures
from kinfolk.report.domains import Domains, domains_picture
from kinfolk.reproduce import reproduce
from kinfolk.runs.portraits import read_portraits


def experiment(**method: Any) -> dict[str, Any]:
    data = {"name": "digits", "clients": 24, "new_clients": 8, "train": 40, "test": 5, "rotate": "clients"}
    settings = tiny_experiment(method={"name": "fedcg", "domains": 4, **method}, data=data, run={"rounds": 2})
    settings["data"]["split"] = {"kind": "iid"}
    return settings


def test_a_run_keeps_the_mean_image_of_every_label_in_every_domain() -> None:
    """With given domains, so that a plain loop over new clients' images can say what the means are."""
    settings = experiment(source="clusters")
    found = read_portraits(kinfolk.run(settings, out="a").folder)
    assert found.labels == list(range(10))
    assert found.images.shape == (4, 10, 8, 8)
    part = kinfolk.load_federation(kinfolk.config.resolve(settings)).newcomers
    assert part is not None
    assert part.domains is not None
    means = np.zeros((4, 10, 8, 8))
    for domain in range(4):
        for label in range(10):
            mine = (part.domains == domain) & (part.y == label)
            assert found.samples[domain, label] == int(mine.sum())
            if mine.any():
                means[domain, label] = part.x[mine].double().view(-1, 8, 8).mean(dim=0).numpy()
    there = found.samples > 0
    low, high = means[there].min(), means[there].max()
    assert np.abs(255 * (means[there] - low) / (high - low) - found.images[there]).max() < 0.51


@pytest.mark.parametrize("source", ["sums", "classifier"])
@pytest.mark.parametrize("new", [True, False])
def test_shards_say_the_same_of_domains_and_draw_the_same_pictures(source: str, new: bool) -> None:
    settings = experiment(source=source)
    if not new:
        del settings["data"]["new_clients"]
    found = []
    for number, engine in enumerate([{}, {"engine": "sharded", "shards": 3}]):
        run = {**settings["run"], "precision": "float64", **engine}
        result = kinfolk.run({**settings, "run": run}, out=f"run{number}")
        row = {name: value for name, value in result.metrics[-1].items() if "domain_" in name}
        assert {"domain_ari", "domain_ari_clients", "domain_table"} <= row.keys()
        assert ("new_domain_table" in row) == new
        found.append((row, read_portraits(result.folder)))
    (one, picture), (several, again) = found
    for name, value in one.items():
        assert np.abs(np.asarray(value, float) - np.asarray(several[name], float)).max(initial=0) < 1e-9, name
    assert np.array_equal(picture.samples, again.samples)
    assert np.abs(picture.images.astype(int) - again.images.astype(int)).max() <= 1  # a mean on the edge of two shades
    assert sum(map(sum, one["domain_table"])) == int(kinfolk.load_federation(result.config).train.y.numel())


def test_without_new_clients_they_are_of_test_sets_and_without_images_there_are_none() -> None:
    settings = experiment(domains=2)
    del settings["data"]["new_clients"], settings["data"]["rotate"]
    result = kinfolk.run(settings, out="a")
    assert read_portraits(result.folder).samples.sum() == 24 * 5
    assert "domain_table" not in result.metrics[-1]
    x, y = torch.randn(6, 10, 5), torch.randint(3, (6, 10))
    pairs = list(zip(x, y))
    flat = kinfolk.run(
        {**tiny_experiment(method={"name": "fedcg", "source": "random"}), "data": {}}, out="b",
        data=kinfolk.Federation.from_arrays(pairs, pairs),
    )  # fmt: skip
    assert not (flat.folder / "domains.json").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images": [["00"]]}, "damaged"),
        ({"images": [["zz" * 4, "00" * 4]]}, "damaged"),
        ({"samples": [[1]]}, "damaged"),
        ({"height": None}, "damaged"),
    ],
)
def test_a_damaged_file_is_one_line(changes: dict[str, Any], words: str) -> None:
    sound = {"labels": [3, 4], "samples": [[1, 2]], "height": 2, "width": 2, "images": [["00" * 4, "ff" * 4]]}
    Path("domains.json").write_text(json.dumps(sound))
    assert read_portraits(Path()).images[0, 1].tolist() == [[255, 255], [255, 255]]
    Path("domains.json").write_text(json.dumps({**sound, **changes}))
    with pytest.raises(UserError, match=words) as caught:
        read_portraits(Path())
    assert "\n" not in str(caught.value)


def test_the_picture_of_a_study_shows_what_its_runs_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Domains] = []

    def draw(runs: Any, path: Path, title: str) -> None:
        seen.extend(runs)
        domains_picture(runs, path, title)

    monkeypatch.setattr(pictures.domains, "domains_picture", draw)
    Path("tiny.toml").write_text(tomli_w.dumps(experiment()))
    rows = {
        "found": [],
        "learned": ["method.learn_graph=true", "method.teacher_rounds=1"],
        "plain": ["method.name=gossip"],
    }
    study = {"study": "Tiny", "experiment": "tiny.toml", "seeds": 1, "columns": {"all": []}, "rows": rows}
    Path("mine.toml").write_text(tomli_w.dumps({**study, "figure": {"kind": "domains"}}))
    done = reproduce("mine.toml")
    with Image.open(done.folder / "mine.png") as picture:
        assert picture.format == "PNG"
    assert [run.name.partition(":")[0] for run in seen] == ["found", "learned"]  # a plain run has no domains
    row = next(iter(done.results.values())).metrics[-1]
    assert seen[0].table.tolist() == row["new_domain_table"]
    assert seen[0].true == ["0°", "90°", "180°", "270°"]
    assert seen[0].graph.tolist() == np.eye(4).tolist()
    assert np.diagonal(seen[1].graph).tolist() == [0.5] * 4
    assert seen[1].occupancy.shape == (len(seen[1].rounds), 4)


def test_domains_are_ordered_by_what_most_of_them_are() -> None:
    table = np.array([[1.0, 0, 9], [0, 8, 1], [7, 1, 1]])
    run = Domains(
        "", ["0"], np.arange(3).reshape(3, 1, 1, 1), ["a", "b", "c"], table, np.array([1]), np.array([[0.1, 0.2, 0.7]]),
        np.ones((1, 1)), np.arange(9.0).reshape(3, 3),
    )  # fmt: skip
    found = run.ordered()
    assert found.images.flatten().tolist() == [2, 1, 0]
    assert found.table.tolist() == [[9, 0, 1], [1, 8, 0], [1, 1, 7]]
    assert found.occupancy.tolist() == [[0.7, 0.2, 0.1]]
    assert found.graph.tolist() == [[8, 7, 6], [5, 4, 3], [2, 1, 0]]


def test_a_study_without_domains_has_no_such_picture() -> None:
    Path("tiny.toml").write_text(tomli_w.dumps(tiny_experiment()))
    study = {"study": "Tiny", "experiment": "tiny.toml", "seeds": 1, "columns": {"all": []}, "rows": {"a": []}}
    Path("mine.toml").write_text(tomli_w.dumps({**study, "figure": {"kind": "domains"}}))
    assert not (reproduce("mine.toml").folder / "mine.png").exists()
