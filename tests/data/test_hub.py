"""Data sets of Hugging Face's library, and partitions of Flower's, all of them local."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from coterie import data
from coterie.config import from_mapping
from coterie.data.objects import hand_over
from coterie.errors import ConfigError, DataError

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    datasets.disable_progress_bars()


def pictures(count: int = 12) -> Any:
    """Grey pictures, each of one shade: 10 times its number."""
    features = {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=["zebra", "ape"]),
        "site": datasets.Value("string"),
    }
    rows = {
        "image": [Image.fromarray(np.full((4, 5), 10 * k, dtype=np.uint8)) for k in range(count)],
        "label": [k % 2 for k in range(count)],
        "site": [["n", "s", "w"][k % 3] for k in range(count)],
    }
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def rows(count: int = 8) -> Any:
    return datasets.Dataset.from_dict(
        {"age": [30.0 + k for k in range(count)], "ward": ["a", "b"] * (count // 2), "label": [0, 1] * (count // 2)}
    )


def test_images_with_their_classes_and_owners() -> None:
    found = hand_over(pictures(), client="site")[0].value
    assert found.x.dtype == torch.uint8 and found.input_shape == (1, 4, 5)
    assert found.x[:, 0, 0, 0].tolist() == [10 * k for k in range(12)]
    assert found.classes == ("zebra", "ape") and found.y.tolist() == [0, 1] * 6  # as the data set counts them
    assert found.owner_names == ("n", "s", "w") and found.owner.tolist() == [0, 1, 2] * 4


def test_a_folder_that_was_saved_is_the_same(tmp_path: Path) -> None:
    pictures().save_to_disk(tmp_path / "saved")
    config = from_mapping({"algorithm": "fedavg", "data": f"hf:{tmp_path / 'saved'},client=site"})
    assert (config.partition, config.clients) == ("natural", 3)
    loaded, held = data.load(config.data), hand_over(pictures(), client="site")[0].value
    assert torch.equal(loaded.x, held.x) and torch.equal(loaded.y, held.y) and torch.equal(loaded.owner, held.owner)
    assert loaded.classes == held.classes and loaded.owner_names == held.owner_names
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="cannot be read as a data set that save_to_disk wrote"):
        data.load(f"hf:{tmp_path / 'empty'}")


def test_a_table_and_its_test_set(tmp_path: Path) -> None:
    both = datasets.DatasetDict({"train": rows(8), "test": rows(4)})
    both.save_to_disk(tmp_path / "saved")
    for found in (hand_over(both)[0].value, data.load(f"hf:{tmp_path / 'saved'}")):
        assert found.features == ("age", "ward=a", "ward=b") and (found.train_count, len(found)) == (8, 12)
        assert found.x[:3, 0].tolist() == [30, 31, 32] and not found.test_apart


def test_sequences_and_arrays_stay_what_they_are() -> None:
    tokens = datasets.Dataset.from_dict({"words": [[3, 4, 5], [6], [7, 8]], "label": [0, 1, 1]})
    found = hand_over(tokens)[0].value
    assert found.x.tolist() == [[3, 4, 5], [6, 0, 0], [7, 8, 0]] and found.x.dtype == torch.int64
    signals = datasets.Dataset.from_dict({"wave": [[0.5, 1.5], [2.5, 3.5]], "label": [0, 1]})
    assert hand_over(signals)[0].value.x.tolist() == [[0.5, 1.5], [2.5, 3.5]]


def test_what_cannot_be_used_is_said() -> None:
    texts = datasets.Dataset.from_dict({"text": ["a b", "c"], "label": [0, 1]})
    with pytest.raises(DataError, match="column 'text' of data holds texts"):
        hand_over(texts, input="text")
    two = datasets.Dataset.from_dict({"a": [[1], [2]], "b": [[1], [2]], "label": [0, 1]})
    with pytest.raises(ConfigError, match="the columns a, b hold images or sequences: say with input="):
        hand_over(two)
    assert hand_over(two, input="b")[0].value.input_shape == (1,)
    with pytest.raises(DataError, match="has no column 'where'"):
        hand_over(pictures(), client="where")


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # the library's reader of CSV leaves it open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_partitions_of_flower_are_clients(tmp_path: Path) -> None:
    flower = pytest.importorskip("flwr_datasets")
    from flwr_datasets.partitioner import IidPartitioner, NaturalIdPartitioner

    natural = NaturalIdPartitioner(partition_by="site")
    natural.dataset = pictures()
    found = hand_over(natural)[0].value
    assert sorted(found.owner_names) == ["n", "s", "w"] and found.classes == ("zebra", "ape")
    shade = {name: found.x[found.owner == k, 0, 0, 0].tolist() for k, name in enumerate(found.owner_names)}
    assert shade["s"] == [10, 40, 70, 100]
    rows(8).to_csv(tmp_path / "rows.csv")
    federated = flower.FederatedDataset(
        dataset="csv", partitioners={"train": IidPartitioner(2)}, data_files=str(tmp_path / "rows.csv"),
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    found = hand_over(federated)[0].value
    assert found.owner_names == ("0", "1") and sorted(found.x[:, 0].tolist()) == [30.0 + k for k in range(8)]
