"""Where prompts come from: files, data sets, and the pictures in them."""

import builtins
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from flowrl.core.errors import ConfigError
from flowrl.data.prompt_sources import Columns, image_folder, load_prompts
from flowrl.data.prompts import Prompt
from flowrl.data.text_cache import Texts
from flowrl.media.media import open_image
from tests.data.row_groups import png
from tests.tables import table
from tests.toys import ToyAdapter


@pytest.fixture
def put(tmp_path):
    def write(content: str | bytes, name: str = "prompts.txt") -> str:
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return str(file)

    return write


def refusal(source: str, columns: Columns | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_prompts(source, "data.prompts", columns or Columns())
    return str(caught.value)


# ---- files


def test_a_text_file_holds_one_prompt_a_line(put):
    found = load_prompts(put("a red circle\n\n  two crosses  \r\n\u00fcber\n"), "data.prompts")
    assert found == [Prompt("a red circle"), Prompt("two crosses"), Prompt("\u00fcber")]


@pytest.mark.parametrize(
    ("line", "reason"),
    table(__file__, "refused_lines"),
)
def test_a_broken_jsonl_line_is_refused_with_its_number_in_the_file(put, pictures, line, reason):
    message = refusal(put('{"prompt": "a", "image": "a.png"}\n\n' + line + '\n{"prompt": "c"}\n', "p.jsonl"))
    assert "line 3" in message
    assert reason in message


@pytest.mark.parametrize(("name", "head"), [("p.txt", ""), ("p.csv", "prompt\n"), ("p.tsv", "prompt\n")])
def test_a_long_list_is_read_no_further_than_is_asked_for_and_never_as_a_whole(put, name, head):
    """A file of 16 MB; three of its prompts take no megabyte."""
    source = put(head + "a long line of words\n" * 800_000, name)
    tracemalloc.start()
    assert len(load_prompts(source, "data.prompts", most=3)) == 3
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("name", ["p.jsonl", "p.csv"])
def test_what_other_programs_sample_a_prompt_by_is_named_once(put, caplog, name):
    record = {"prompt": "a", "seed": "1", "negative_prompt": "b", "height": "64", "level": "2"}
    lines = {"p.jsonl": json.dumps(record), "p.csv": f"{','.join(record)}\n{','.join(record.values())}"}
    with caplog.at_level("WARNING", logger="flowrl"):
        (found,) = load_prompts(put(lines[name], name), "data.prompts")
        load_prompts(put(lines[name], name), "--prompts", Columns(names_sample=True))
        load_prompts(put('{"prompt": "a", "level": 1}', "other.jsonl"), "data.prompts")
    assert found.metadata == {k: v for k, v in record.items() if k != "prompt"}
    (told,) = caplog.messages
    assert "its records have negative_prompt, seed, height, and no sampler reads them here" in told


@pytest.mark.parametrize("source", ["shapes:tran", "nowhere/prompts.txt"])
def test_the_shapes_world_is_a_source_of_its_own_and_an_unknown_source_is_refused_with_the_key(source):
    train, held_out = (load_prompts(f"shapes:{split}", "data.prompts") for split in ("train", "heldout"))
    assert len(held_out) >= 500
    assert not {p.text for p in train} & {p.text for p in held_out}
    assert f"data.prompts={source!r}" in refusal(source)


# ---- forms


RECORDS = [Prompt("a red fox", {"level": "1"}), Prompt('says "stop", twice', {"level": "2"})]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.csv", 'prompt,level\r\na red fox,1\r\n\r\n"says ""stop"", twice",2\r\n'),
        ("p.CSV", '\ufefflevel, prompt\n1,a red fox\n2,"says ""stop"", twice"\n'),
        ("p.tsv", 'prompt\tlevel\na red fox\t1\n"says ""stop"", twice"\t2\n'),
        ("p.json", '[{"prompt": "a red fox", "level": "1"},\n {"prompt": "says \\"stop\\", twice", "level": "2"}]'),
        ("p.JSONL", '{"prompt": "a red fox", "level": "1"}\n{"prompt": "says \\"stop\\", twice", "level": "2"}\n'),
    ],
)
def test_tables_and_lists_are_read_as_what_they_are(put, name, content):
    assert load_prompts(put(content, name), "data.prompts") == RECORDS


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("p.json", '["a", "b"]', [Prompt("a"), Prompt("b")]),
        ("p.tsv", 'prompt\tn\n"STOP" on a wall\t"\n', [Prompt('"STOP" on a wall', {"n": '"'})]),
        (
            "p.tsv",
            '"prompt"\t"n"\n"one\ntwo"\t1\n"a ""b"""\t2\n',
            [Prompt("one\ntwo", {"n": "1"}), Prompt('a "b"', {"n": "2"})],
        ),
        ("p.csv", 'prompt,n\n"one\ntwo",1\n', [Prompt("one\ntwo", {"n": "1"})]),
        ("p.csv", 'prompt,n\r\n"one\r\ntwo",1\r\n', [Prompt("one\ntwo", {"n": "1"})]),
        ("p.txt", "a cat\ra dog\r", [Prompt("a cat"), Prompt("a dog")]),
        ("p.jsonl", '{"prompt": "a", "tag": [1]}\n\n{"prompt": "b"}\n', [Prompt("a", {"tag": [1]}), Prompt("b")]),
        # legal in JSON, where str.splitlines would cut
        ("p.jsonl", '{"prompt": "one\u2028two\x85three"}\n', [Prompt("one\u2028two\x85three")]),
        ("p.txt", "\ufeffa cat\n", [Prompt("a cat")]),
        ("p.jsonl", '\ufeff{"prompt": "a cat"}\n', [Prompt("a cat")]),
    ],
)
def test_marks_and_line_breaks_stay_where_they_belong(put, name, content, expected):
    assert load_prompts(put(content, name), "data.prompts") == expected


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        *((name, content, "there is no prompt in it") for name in ("p.txt", "p.jsonl") for content in ("", "\n\n  \n")),
        ("p.txt", "caf\u00e9\n".encode("latin-1"), "not UTF-8"),
        (
            "p.csv",
            "a red fox\na cat\n",
            "line 1: has no 'prompt'; there are: a re",
        ),
        ("p.csv", "prompt;level\na;1\n", "there are: prompt;level (separated by commas)"),
        ("p.csv", "prompt,level\na,1\nb\n", "line 3: has 1 cells, but the header has 2 columns"),
        ("p.csv", "prompt,level\na cat, sleeping,1\n", "line 2: has 3 cells"),
        ("p.csv", "prompt,level\n,1\n", "line 2: 'prompt' is empty"),
        ("p.csv", "prompt,tag,tag\na,1,2\n", "the column 'tag' twice"),
        ("p.csv", 'prompt\n"a\n', "not a readable table"),
        ("p.csv", "prompt\n", "there is no prompt in it"),
        ("p.json", '{"prompt": "a"}', "is a list of strings or of records, this is dict"),
        ("p.json", '["a", 3]', "item 2: needs a string or a record, got int '3'"),
        ("p.json", '[{"text": "a"}]', "item 1: has no 'prompt'; there are: text"),
        ("p.json", '["a",', "not valid JSON"),
        ("p.json", "[]", "there is no prompt in it"),
        ("p.txt", "a\nb\0c\n", "line 2: holds a NUL"),
        *((f"p.{end}", "a\n", f"not read from a .{end} file") for end in ("xlsx", "yaml", "zip", "md")),
    ],
)
def test_a_file_that_is_not_what_it_says_is_refused_by_place_and_name(put, name, content, reason):
    message = refusal(put(content, name))
    assert f"data.prompts={put(content, name)!r}" in message
    assert reason in message
    if "not read from" in reason:
        assert all(form in message for form in (".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet", "hf:PATH"))


def test_a_parquet_is_read_no_further_than_the_prompts_that_are_asked_for(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "set.parquet"
    table = arrow.table({"prompt": [f"prompt {k}" for k in range(40)]})
    parquet.write_table(table, file, row_group_size=10, compression="none", use_dictionary=False)
    content = bytearray(file.read_bytes())
    start = parquet.ParquetFile(file).metadata.row_group(2).column(0).data_page_offset
    content[start : start + 8] = b"\xff" * 8
    file.write_bytes(bytes(content))
    assert [p.text for p in load_prompts(str(file), "k", most=20)] == [f"prompt {k}" for k in range(20)]
    assert "not a readable parquet file after row 20" in refusal(str(file))


@pytest.mark.parametrize("most", [1, 2])
def test_only_the_first_prompts_are_taken_of_any_form(put, most):
    for name, content in (("p.txt", "a\nb\n"), ("p.json", '["a", "b"]'), ("p.csv", "prompt\na\nb\n")):
        assert [p.text for p in load_prompts(put(content, name), "k", most=most)] == ["a", "b"][:most]
    assert len(load_prompts("shapes:train", "k", most=most)) == most


# ---- pictures


@pytest.fixture
def pictures(tmp_path):
    for name in ("a.png", "b.jpg"):
        Image.new("RGB", (6, 4), (200, 10, 10)).save(tmp_path / name)
    (tmp_path / "text.png").write_text("no picture")
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])


def test_pictures_of_a_record_are_found_beside_its_file_and_told_to_the_rewards(put, pictures, tmp_path):
    records = ['"x", "image": "a.png", "tag": 1', '"x", "images": ["a.png", "b.jpg"]', '"y"']
    lines = "\n".join('{"prompt": ' + record + "}" for record in records)
    one, two, none = load_prompts(put(lines, "p.jsonl"), "data.prompts")
    first, second = (str((tmp_path / name).resolve()) for name in ("a.png", "b.jpg"))
    assert one == Prompt("x", {"tag": 1, "images": [first]}, (first,))
    assert two == Prompt("x", {"images": [first, second]}, (first, second))
    assert none == Prompt("y")
    assert open_image(first).size == (6, 4)


def test_a_picture_of_more_pixels_than_are_taken_is_refused_with_its_line(put, pictures, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 8)  # a.png has 24, and twice the limit is an error of Pillow
    message = refusal(put('{"prompt": "x", "image": "a.png"}\n', "p.jsonl"))
    assert "line 1" in message
    assert "more pixels than an image may have" in message


def test_columns_of_a_jsonl_may_have_other_names(put, pictures, tmp_path):
    lines = '{"caption": "x", "photo": "a.png", "image": 7}'
    (found,) = load_prompts(put(lines, "p.jsonl"), "data.prompts", Columns("caption", "photo"))
    file = str((tmp_path / "a.png").resolve())
    assert found == Prompt("x", {"image": 7, "images": [file]}, (file,))
    message = refusal(put(lines, "p.jsonl"), Columns("caption", "picture"))
    assert "line 1: has no 'picture' (data.image_column); there are: caption, photo, image" in message


# ---- tables and data sets


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Where pictures from inside data sets go."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    return tmp_path / "cache" / "images"


TABLE = {"prompt": ["a", "b", "a"], "level": [1, 2, 3], "image": [png(10), png(20), png(10)]}


def data_set(columns: dict[str, list[Any]]) -> Any:
    """Its `image` decoded on access, as data sets have them."""
    datasets = pytest.importorskip("datasets")
    if "image" not in columns:
        return datasets.Dataset.from_dict(columns)
    stored = [{"bytes": data, "path": None} for data in columns["image"]]
    return datasets.Dataset.from_dict(columns | {"image": stored}).cast_column("image", datasets.Image())


def check_table(found: list[Prompt], cache: Path) -> None:
    assert [p.text for p in found] == TABLE["prompt"]
    assert [p.metadata for p in found] == [
        {"level": level, "images": list(p.images)} for level, p in zip(TABLE["level"], found, strict=True)
    ]
    # One file for equal pictures, with their bytes.
    assert found[0].images == found[2].images != found[1].images
    assert sorted(cache.iterdir()) == sorted({Path(p.images[0]) for p in found})
    for prompt, data in zip(found, TABLE["image"], strict=True):
        (file,) = prompt.images
        assert Path(file).read_bytes() == data
        assert file.endswith(".png")
        assert open_image(file).size == (6, 4)


@pytest.mark.parametrize("layout", ["parquet", "saved", "saved splits", "parquet files"])
def test_a_parquet_file_and_a_folder_with_a_data_set_are_read_with_their_images(tmp_path, cache, layout):
    folder, made = tmp_path / "set", data_set(TABLE)
    if layout == "parquet":
        made.to_parquet(tmp_path / "set.parquet")
        check_table(load_prompts(str(tmp_path / "set.parquet"), "data.prompts"), cache)
        return
    if layout == "saved":
        made.save_to_disk(folder)
    elif layout == "saved splits":
        datasets = pytest.importorskip("datasets")
        datasets.DatasetDict({"train": made, "test": data_set({"prompt": ["c"]})}).save_to_disk(folder)
        assert load_prompts(f"hf:{folder}:test", "data.eval_prompts") == [Prompt("c")]
    else:
        folder.mkdir()
        made.to_parquet(folder / "train-00000-of-00001.parquet")
        assert len(load_prompts(f"hf:{folder}:train[1:]", "data.prompts")) == 2
    check_table(load_prompts(f"hf:{folder}", "data.prompts"), cache)


def test_a_folder_of_jsonl_files_is_a_data_set_with_paths_to_its_pictures(tmp_path, cache, pictures):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"prompt": "x", "image": "../a.png", "tag": 1}\n')
    (found,) = load_prompts(f"hf:{tmp_path / 'set'}", "data.prompts")
    file = str((tmp_path / "a.png").resolve())
    assert found == Prompt("x", {"tag": 1, "images": [file]}, (file,))


def test_lists_of_pictures_and_of_paths_are_taken(tmp_path, cache, pictures):
    datasets = pytest.importorskip("datasets")
    made = data_set({"text": ["x"], "photos": [["a.png", "b.jpg"]]})
    made.to_parquet(tmp_path / "set.parquet")
    (found,) = load_prompts(str(tmp_path / "set.parquet"), "data.prompts", Columns("text", "photos"))
    assert found.images == tuple(str((tmp_path / name).resolve()) for name in ("a.png", "b.jpg"))
    stored = [[{"bytes": png(1), "path": None}, {"bytes": png(2), "path": None}]]
    inside = datasets.Dataset.from_dict({"text": ["x"], "photos": stored})
    inside.cast_column("photos", datasets.List(datasets.Image())).save_to_disk(tmp_path / "inside")
    (found,) = load_prompts(f"hf:{tmp_path / 'inside'}", "data.prompts", Columns("text", "photos"))
    assert [Path(file).read_bytes() for file in found.images] == [png(1), png(2)]


def test_columns_of_pictures_that_nobody_asked_for_are_no_metadata(tmp_path, cache):
    data_set(TABLE).rename_column("image", "preview").save_to_disk(tmp_path / "set")
    found = load_prompts(f"hf:{tmp_path / 'set'}", "data.prompts")
    assert found == [Prompt(text, {"level": k}) for k, text in enumerate(TABLE["prompt"], 1)]


def test_the_same_set_again_gives_the_same_prompts_so_embeddings_and_resumes_find_them(tmp_path, cache):
    data_set(TABLE).to_parquet(tmp_path / "set.parquet")
    first = load_prompts(str(tmp_path / "set.parquet"), "data.prompts")
    written = {file: file.stat().st_mtime_ns for file in cache.iterdir()}
    (tmp_path / "set.parquet").rename(tmp_path / "moved.parquet")
    again = load_prompts(str(tmp_path / "moved.parquet"), "data.eval_prompts")
    assert again == first
    assert {file: file.stat().st_mtime_ns for file in cache.iterdir()} == written

    class Looking(ToyAdapter):
        def encode(self, prompts: list[str], pictures: Any = None) -> Any:
            assert [[picture.size for picture in own] for own in pictures] == [[(6, 4)]] * len(prompts)
            return super().encode(prompts)

    texts = Texts(Looking(), (*first, *again), cache=True)
    assert len(texts.rows) == 2
    assert torch.equal(texts.lookup(first)["prompt"], texts.lookup(again)["prompt"])


@pytest.mark.parametrize(
    ("columns", "wanted", "reason"),
    [
        ({"text": ["a"]}, Columns(), "row 1: has no 'prompt'; there are: text"),
        ({"prompt": [3]}, Columns(), "row 1: needs a string under 'prompt', got 3"),
        ({"prompt": ["a"], "photo": ["x"]}, Columns(image="photos"), "did you mean 'photo'"),
        ({"prompt": ["a"], "photo": ["x.png"]}, Columns(image="photo"), "row 1: there is no image 'x.png'"),
        ({"prompt": ["a"], "photo": [3]}, Columns(image="photo"), "got 3 under 'photo'"),
        ({"prompt": ["a", "b"], "image": [png(1), png(2)[:40]]}, Columns(), "row 2: the image under 'image' cannot"),
        ({"prompt": []}, Columns(), "there is no prompt in it"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused_by_its_number(tmp_path, cache, columns, wanted, reason):
    made = data_set(columns)
    made.to_parquet(tmp_path / "set.parquet")
    assert reason in refusal(str(tmp_path / "set.parquet"), wanted)
    made.save_to_disk(tmp_path / "set")
    assert reason in refusal(f"hf:{tmp_path / 'set'}", wanted)


def test_a_split_that_does_not_exist_is_refused_with_those_that_do(tmp_path, cache):
    datasets = pytest.importorskip("datasets")
    one = data_set({"prompt": ["c"]})
    datasets.DatasetDict({"validation": one, "test": one}).save_to_disk(tmp_path / "saved")
    (tmp_path / "files").mkdir()
    one.to_parquet(tmp_path / "files" / "validation.parquet")
    assert "there is no split 'train'; there are: validation, test" in refusal(f"hf:{tmp_path / 'saved'}")
    assert "there is no split 'dev[:3]'; there are: validation" in refusal(f"hf:{tmp_path / 'files'}:dev[:3]")
    assert "takes a whole split only" in refusal(f"hf:{tmp_path / 'saved'}:test[:1]")
    assert load_prompts(f"hf:{tmp_path / 'files'}", "data.prompts") == [Prompt("c")]  # the only one


def test_a_set_with_subsets_wants_one(tmp_path, cache):
    lines = ["---", "configs:"]
    for name in ("one", "two"):
        (tmp_path / "set").mkdir(exist_ok=True)
        data_set({"prompt": [name]}).to_parquet(tmp_path / "set" / f"{name}.parquet")
        lines += [f"- config_name: {name}", f"  data_files: {name}.parquet"]
    (tmp_path / "set" / "README.md").write_text("\n".join([*lines, "---"]))
    source = f"hf:{tmp_path / 'set'}"
    assert load_prompts(source, "data.prompts", Columns(subset="two")) == [Prompt("two")]
    message = refusal(source)
    assert "data.subset=None" in message
    assert "'one', 'two'" in message
    assert "'one', 'two'" in refusal(source, Columns(subset="three"))


def test_a_set_that_cannot_be_loaded_is_refused_with_the_reason(tmp_path, cache):
    (tmp_path / "empty").mkdir()
    assert "the data set cannot be loaded" in refusal(f"hf:{tmp_path / 'empty'}")
    assert "the data set cannot be loaded" in refusal("hf:./nowhere")
    (tmp_path / "set.parquet").write_text("no table")
    assert "not a readable parquet file" in refusal(str(tmp_path / "set.parquet"))


def test_a_missing_package_is_named_with_the_command(tmp_path, monkeypatch):
    (tmp_path / "set.parquet").write_bytes(b"")
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] in ("pyarrow", "datasets"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    for source in (str(tmp_path / "set.parquet"), "hf:owner/name"):
        assert "is not installed" in refusal(source)
        assert "run pip install 'flowrl[data]'" in refusal(source)


def test_images_are_kept_in_the_users_cache_unless_set_otherwise(monkeypatch, tmp_path):
    monkeypatch.delenv("FLOWRL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert image_folder() == tmp_path / "flowrl" / "images"
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "own"))
    assert image_folder() == tmp_path / "own" / "images"
