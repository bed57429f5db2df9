"""Trackers with their real libraries, offline: what each stores of a run that was resumed is read back.

Each is skipped where its library is not installed.
"""

import json
import sqlite3
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate import PartialState

from flowrl.run import trackers
from flowrl.run.folder import RunFolder
from tests.run.test_trackers import evaluate, going, row, train

Curves = dict[str, list[tuple[int, float]]]


def add(curves: Curves, step: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        curves.setdefault(name, []).append((int(step), float(value)))


def of_trackio(root: Path) -> tuple[Curves, dict[str, Any], int]:
    curves: Curves = {}
    (file,) = (root / "stored").glob("*.db")
    with sqlite3.connect(file) as base:
        for step, values in base.execute("SELECT step, metrics FROM metrics ORDER BY id"):
            add(curves, step, json.loads(values))
        ((config,),) = base.execute("SELECT config FROM configs").fetchall()
    return curves, json.loads(config), 0


def of_dvclive(root: Path) -> tuple[Curves, dict[str, Any], int]:
    folder, curves = root / "run/trackers/dvclive", Curves()
    for file in (folder / "plots/metrics").rglob("*.tsv"):
        name = str(file.relative_to(folder / "plots/metrics").with_suffix(""))
        for line in file.read_text().splitlines()[1:]:
            step, value = line.split("\t")
            add(curves, step, {name: value})
    assert (folder / "dvc.yaml").is_file()
    assert not (root / "dvc.yaml").exists()
    return curves, yaml.safe_load((folder / "params.yaml").read_text()), 0


def of_mlflow(root: Path) -> tuple[Curves, dict[str, Any], int]:
    from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

    client, curves = MlflowClient(), Curves()
    run = json.loads((root / "run/trackers.json").read_text())["mlflow"]["run"]
    data = client.get_run(run).data
    for name in data.metrics:
        for point in client.get_metric_history(run, name):
            add(curves, point.step, {name: point.value})
    images = [
        file for step in client.list_artifacts(run, "eval/images") for file in client.list_artifacts(run, step.path)
    ]
    return curves, data.params, len(images)


def of_comet_ml(root: Path) -> tuple[Curves, dict[str, Any], int]:
    curves, config, keys = Curves(), dict[str, Any](), set[str]()
    for file in sorted((root / "stored").glob("*.zip"), key=lambda file: file.stat().st_mtime_ns):
        with zipfile.ZipFile(file) as archive:
            keys.add(json.loads(archive.read("experiment.json"))["offline_id"])
            messages = [json.loads(line)["payload"] for line in archive.read("messages.json").splitlines()]
        for message in messages:
            metric, given = message.get("metric"), message.get("param")
            if metric is not None and not metric["metricName"].startswith("sys."):
                add(curves, metric["step"], {metric["metricName"]: metric["metricValue"]})
            elif given is not None and given["source"] == "manual":
                config[given["paramName"]] = given["paramValue"]
    assert len(keys) == 1
    return curves, config, 0


def of_swanlab(root: Path) -> tuple[Curves, dict[str, Any], int]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record  # pyright: ignore[reportMissingImports]
    from swanlab.sdk.internal.core_python.store import DataStoreReader  # pyright: ignore[reportMissingImports]

    curves, config, images = Curves(), dict[str, Any](), 0
    for file in sorted((root / "run/trackers/swanlab").rglob("*.swanlab")):
        reader = DataStoreReader()
        reader.open(file)
        for data in reader:
            record = Record()
            record.ParseFromString(data)
            if record.HasField("scalar"):
                add(curves, record.scalar.step, {record.scalar.key: record.scalar.value.number})
            elif record.HasField("media"):
                images += len(record.media.value.items)
        stored = yaml.safe_load((file.parent / "files/config.yaml").read_text())
        config |= {name: entry["value"] for name, entry in stored.items()}
    return curves, config, images


def of_aim(root: Path) -> tuple[Curves, dict[str, Any], int]:
    from aim import Repo  # pyright: ignore[reportMissingImports]
    from aim.sdk.index_manager import RepoIndexManager  # pyright: ignore[reportMissingImports]

    folder, curves = str(root / "run/trackers"), Curves()
    run = json.loads((root / "run/trackers.json").read_text())["aim"]["run"]
    RepoIndexManager.get_index_manager(Repo(folder)).index(run)  # as `aim up` does
    repo = Repo(folder)
    stored = repo.get_run(run)
    for metric in stored.metrics():
        if not metric.name.startswith("__system"):
            points = metric.data.view(("val",)).items()
            for step, (value,) in points:
                add(curves, step, {metric.name: value})
    images = sum(len(found.values.sparse_list()[0]) for found in repo.query_images("True").iter())
    return curves, stored["hparams"], images


LIBRARIES: dict[str, tuple[Callable[[Path], tuple[Curves, dict[str, Any], int]], dict[str, Any]]] = {
    "trackio": (of_trackio, {}),
    "dvclive": (of_dvclive, {}),
    "mlflow": (of_mlflow, {}),
    "comet_ml": (of_comet_ml, {"online": False}),
    "swanlab": (of_swanlab, {"mode": "offline"}),
    "aim": (of_aim, {"system_tracking_interval": None}),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_each_iteration_of_a_resumed_run_stands_once_with_the_values_of_its_rows(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for variable in ("TRACKIO_DIR", "COMET_OFFLINE_DIRECTORY"):  # read at the import
        monkeypatch.setenv(variable, str(tmp_path / "stored"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setattr(trackers, "_HASTE_S", 60.0)  # MLflow makes the tables of its database first
    pytest.importorskip(name)
    read, options = LIBRARIES[name]
    PartialState()
    folder, given = RunFolder(tmp_path / "run"), [{"name": name, **options}]
    evaluate(folder, "base", 0, 0.25)
    first = going(folder, given)
    train(folder, first, 0, 3)
    first.leave(2)
    folder.metrics.truncate(2)
    second = going(folder, given)
    evaluate(folder, "iteration-000004", 4, 0.5)
    train(folder, second, 2, 6)
    evaluate(folder, "tuned", 6, 0.75)
    second.finish({"iterations": 6, "seconds": 1.5})
    curves, config, images = read(tmp_path)
    assert {key: sorted(points) for key, points in curves.items()} == {
        "loss": [(i, row(i)["loss"]) for i in range(1, 7)],
        "count": [(i, i) for i in range(1, 7)],
        "eval/jpeg": [(0, 0.25), (6, 0.75)],
        "summary/iterations": [(6, 6)],
        "summary/seconds": [(6, 1.5)],
    }
    assert {key: str(config[key]) for key in ("optim.lr", "optim.ema", "rewards.0.name")} == {
        "optim.lr": "0.1",
        "optim.ema": "null",
        "rewards.0.name": "jpeg",
    }
    assert images == (6 if name in ("mlflow", "swanlab", "aim") else 0)
