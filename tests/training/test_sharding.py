"""What processes that share a network do together, without the network: checkpoints in shards, equal numbers of steps.

Threads stand for processes.
"""

import json
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.config.load import load_config, resolve
from flowrl.core.errors import CheckpointError, ConfigError, Elsewhere
from flowrl.run import checkpoint
from flowrl.run.checkpoint import Checkpoint
from flowrl.training.microbatches import forwards, microbatches
from flowrl.training.sharding import Rows
from flowrl.training.world import World
from tests.e2e.conftest import BASE
from tests.evaluation import test_evaluate
from tests.toys import OneOf, ToyAdapter
from tests.training import test_buffer


class Meeting:
    """Where threads exchange values."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


@dataclass(frozen=True)
class Thread(World):
    meeting: Meeting

    def gather(self, value: Any) -> list[Any]:
        return self.meeting.exchange(self.rank, value)


def everywhere(size: int, work: Callable[[World], Any]) -> list[Any]:
    """What `work` returns or raises in each of the threads."""
    meeting = Meeting(size)

    def one(rank: int) -> Any:
        try:
            return work(Thread(rank, size, torch.device("cpu"), meeting))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


TENSORS = {
    "weights/policy/a.weight": torch.randn(7, 3, generator=torch.Generator().manual_seed(0)),
    "weights/policy/b.bias": torch.arange(5.0).bfloat16(),
    "optim/table/exp_avg": torch.randn(1, 2, 2, generator=torch.Generator().manual_seed(1)),
    "optim/table/step": torch.tensor(3.0),
}


def dealt(rank: int, size: int) -> dict[str, Rows]:
    """Rows of every tensor that has some, as FSDP2 deals them out: in equal runs, the last ones shorter or empty."""
    found = {}
    for name, value in TENSORS.items():
        if value.ndim:
            run = -(-len(value) // size)
            found[name] = (min(rank * run, len(value)), min((rank + 1) * run, len(value)))
    return found


def save(folder: Path, size: int, iteration: int = 4) -> list[Any]:
    def work(world: World) -> Path:
        rows = dealt(world.rank, size)
        own = {k: v[slice(*rows[k])].clone() if k in rows else v for k, v in TENSORS.items()}
        return checkpoint.save(folder, Checkpoint(iteration, own, {"seconds": 1.5}, rows), 3, world)

    return everywhere(size, work)


@pytest.mark.parametrize("before", [2, 3, 9])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_a_checkpoint_in_shards_is_read_by_any_number_of_processes(tmp_path: Path, before: int, after: int):
    assert save(tmp_path, before) == [checkpoint.path_of(tmp_path, 4)] * before
    assert len(list(checkpoint.path_of(tmp_path, 4).glob("*.safetensors"))) == before
    whole = checkpoint.load(tmp_path, 4)
    assert whole.state == {"seconds": 1.5}
    assert whole.tensors.keys() == TENSORS.keys()
    assert all(torch.equal(whole.tensors[name], value) for name, value in TENSORS.items())
    for rank in range(after):
        rows = dealt(rank, after)
        own = checkpoint.load(tmp_path, 4, rows.get, slice(rank, None, after)).tensors
        for name, value in TENSORS.items():
            expected = value[slice(*rows[name])] if name in rows else value
            assert own[name].dtype == value.dtype
            assert torch.equal(own[name], expected), (name, rank)


def test_rows_are_read_from_a_checkpoint_of_one_process_too(tmp_path: Path):
    checkpoint.save(tmp_path, Checkpoint(4, TENSORS, {}), 3)
    own = checkpoint.load(tmp_path, 4, dealt(1, 2).get).tensors
    assert torch.equal(own["weights/policy/a.weight"], TENSORS["weights/policy/a.weight"][4:])
    assert torch.equal(own["optim/table/step"], TENSORS["optim/table/step"])


def test_a_shard_that_cannot_be_written_fails_everywhere_and_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch):
    save(tmp_path, 2, iteration=3)
    write = safetensors.torch.save_file

    def failing(tensors, file):
        if Path(file).name == "state-00001.safetensors":
            raise OSError("No space left on device")
        write(tensors, file)

    monkeypatch.setattr(safetensors.torch, "save_file", failing)
    for error in save(tmp_path, 2):
        assert isinstance(error, CheckpointError)
        assert "No space left on device; iteration 3 is safe" in str(error)
    assert [entry.name for entry in tmp_path.iterdir()] == ["iteration-000003"]


def test_a_damaged_or_missing_shard_is_refused(tmp_path: Path):
    save(tmp_path, 2)
    source = checkpoint.path_of(tmp_path, 4)
    file, manifest = source / "state-00001.safetensors", source / "manifest.json"
    content, entries = file.read_bytes(), json.loads(manifest.read_text())
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"00001\.safetensors is truncated or was changed"):
        checkpoint.load(tmp_path, 4)
    # The hashes of shards are shared out: only the process whose file it is sees the damage, and all of them stop.
    found = everywhere(2, lambda w: w.together(lambda: checkpoint.load(tmp_path, 4, verify=slice(w.rank, None, 2))))
    assert [type(error) for error in found] == [Elsewhere, CheckpointError]
    file.write_bytes(content)
    manifest.write_text(json.dumps({name: value for name, value in entries.items() if name != file.name}))
    with pytest.raises(CheckpointError, match="leaves out a file"):
        checkpoint.load(tmp_path, 4)


@settings(max_examples=40, deadline=None)
@given(prompts=st.integers(1, 9), size=st.integers(1, 5), seeds=st.integers(1, 4), batch=st.integers(1, 9))
def test_all_processes_evaluate_in_as_many_rounds_of_as_many_forwards(prompts, size, seeds, batch):
    counted, lengths = [], set()
    for rank in range(size):
        world = OneOf(rank, size, test_evaluate.CPU)
        options = {"samples_per_prompt": seeds, "batch_size": batch, "sharded": True}
        rounds = test_evaluate.evaluator(Path(), ToyAdapter(), world=world, **options)._rounds(prompts, seeds)
        counted += [slot for slots, counts in rounds if counts for slot in slots]
        lengths.add(tuple(-(-len(slots) * seeds // batch) for slots, _ in rounds))
    assert counted == list(range(prompts))
    assert len(lengths) == 1


@pytest.mark.parametrize("key_per_step", [False, True])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_the_microbatches_of_a_share_are_counted_before_they_are_made(batch_size: int, key_per_step: bool):
    edges, adapter = test_buffer.table(), ToyAdapter(key_per_step=key_per_step)
    for order in (
        torch.randperm(12, generator=torch.Generator().manual_seed(0))[:7],
        torch.zeros(0, dtype=torch.int64),
    ):
        drawn = test_buffer.drawn(edges)
        counts = Counter(forward.key for forward in forwards(drawn, adapter, order, batch_size))
        found = microbatches(drawn, torch.zeros(12, 1), adapter, batch_size=batch_size, order=order)
        keys = [adapter.batch_key(int(batch.step.index[0])) for batch in found]
        assert counts == {key: keys.count(key) for key in sorted(set(keys))}


def test_work_that_fails_on_one_process_fails_on_all():
    def work(world: World) -> list[int]:
        return world.together(lambda: 6 // (2 - world.rank))

    assert everywhere(2, work) == [[3, 6], [3, 6]]
    found = everywhere(3, work)
    assert [type(error) for error in found] == [Elsewhere, Elsewhere, ZeroDivisionError]
    assert str(found[0]) == str(found[2])


@pytest.mark.parametrize("option", ["layerwise_casting: float8_e4m3fn", "quantize: int8"])
def test_weights_that_change_their_type_in_each_layer_are_not_split(tmp_path: Path, option: str):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(BASE))
    words = ["model.shard=true", "model.lora={rank: 4}", f"model.memory={{{option}}}"]
    with pytest.raises(ConfigError, match="shard=true with memory"):
        resolve(load_config(tmp_path / "run.yaml", words))
