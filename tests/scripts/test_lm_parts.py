"""The helpers of train_lm.py, each alone."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from lm import compare as compare_module
from lm.checkpoint import load_checkpoint, save_checkpoint
from lm.compare import ChildError, compare
from lm.data import load_corpus
from lm.memory import MEASURED_ITERATIONS, PlainMemory
from lm.model import PRESETS, meta_model
from lm.options import UsageError, paged_arguments, parse_options, plain_arguments, resolve_budget

WRONG_OPTIONS = {
    "--preset huge --no-pager": "--preset",
    "--steps 0 --no-pager": "--steps=0 must be at least 1",
    "--lr -1 --no-pager": "--lr=-1.0",
    "--lr nan --no-pager": "--lr=nan",
    "--seq 257 --no-pager": "256 positions",
    "--preset tiny": "--device-budget is missing",
    "--device-budget 1GiB --no-pager": "exclude each other",
    "--compare --no-pager --device-budget 1GiB": "exclude each other",
    "--device-budget 40%": "--compare",
    "--device-budget 4x": "not a byte count",
    "--device-budget ten% --compare": "not a percentage",
    "--device-budget=-4% --compare": "not a percentage",
    "--device-budget 1GiB --page-size 2XiB": "--page-size",
    "--device-budget 1GiB --needed lots": "not a byte count",
    "--device-budget 1GiB --disk-budget 1GiB": "--disk-path",
    "--device-budget 1GiB --disk-budget 1GiB --disk-path /no/such": "/no/such",
    "--no-pager --json /no/such/file.json": "no folder /no/such",
    "--no-pager --save /tmp": "is a folder",
    "--compare --device-budget 40% --save file.pt": "--save",
    "--nonsense": "--nonsense",
}


@pytest.mark.parametrize("line", WRONG_OPTIONS)
def test_wrong_options_are_refused_by_name(line: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_options(line.split())
    assert WRONG_OPTIONS[line] in str(caught.value)


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="no CUDA device"):
        parse_options(["--no-pager", "--device=cuda"])


@pytest.mark.parametrize(
    ("text", "expected"), [("40%", 400), (" 12.5 % ", 125), ("0%", 0), ("1KiB", 1024)]
)
def test_budgets_are_bytes_or_shares(text: str, expected: int) -> None:
    assert resolve_budget(text, "--device-budget", needed=1000) == expected


def test_children_of_a_comparison_get_the_same_training(tmp_path: Path) -> None:
    line = "--compare --preset 10m --dtype bf16 --steps 7 --batch 3 --seq 32 --lr 0.1 --clip 0"
    budgets = f"--device-budget 50% --host-budget 1MiB --disk-budget 20% --disk-path {tmp_path}"
    options = parse_options([*line.split(), *budgets.split(), "--seed=5", "--page-size=64KiB"])
    plain = parse_options(plain_arguments(options, tmp_path / "plain.json"))
    paged = parse_options(paged_arguments(options, tmp_path / "paged.json", needed=1000))
    for name in ("preset", "dtype", "steps", "batch", "seq", "lr", "warmup", "clip", "seed"):
        assert getattr(plain, name) == getattr(paged, name) == getattr(options, name)
    assert not plain.pager
    assert [paged.budget_bytes(tier, paged.needed) for tier in ("device", "host", "disk")] == [
        500,
        1 << 20,
        200,
    ]
    assert (paged.page_size, paged.disk_path) == ("64KiB", tmp_path)


def test_batches_depend_on_seed_and_step_alone(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)) * 8)
    corpus = load_corpus(path, seq=16)
    tokens, targets = corpus.batch(seed=1, step=9, batch=3, seq=16)
    again, _ = corpus.batch(seed=1, step=9, batch=3, seq=16)
    other, _ = corpus.batch(seed=1, step=10, batch=3, seq=16)
    assert tokens.shape == targets.shape == (3, 16)
    assert torch.equal(tokens, again)
    assert not torch.equal(tokens, other)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_every_window_of_a_file_can_be_drawn(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"abcd")
    corpus = load_corpus(path, seq=2)
    tokens, _ = corpus.batch(seed=0, step=0, batch=64, seq=2)
    assert {bytes(row.tolist()) for row in tokens} == {b"ab", b"bc"}
    with pytest.raises(ValueError, match="4 bytes, fewer than the 5"):
        load_corpus(path, seq=4)


def test_the_default_text_is_python() -> None:
    corpus = load_corpus(None, seq=64)
    assert len(corpus.data) >= 1_000_000
    assert b"\ndef " in corpus.data.tobytes()
    assert corpus.sha256 == load_corpus(None, seq=64).sha256


@pytest.mark.parametrize(
    ("preset", "millions"),
    [("10m", 11), ("125m", 86), ("350m", 303), ("1b", 1213), ("7b", 6453)],
)
def test_presets_have_their_sizes(preset: str, millions: int) -> None:
    model = meta_model(preset, torch.float32)
    assert sum(p.numel() for p in model.parameters()) // 1_000_000 == millions


def test_init_weights_writes_every_parameter() -> None:
    model = meta_model("tiny", torch.float32).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model.init_weights(torch.Generator().manual_seed(0))
    assert all(p.isfinite().all() for p in model.parameters())
    into_residual = model.get_parameter("blocks.0.mlp_down.weight")
    std = 0.02 / (2 * PRESETS["tiny"].shape.layers) ** 0.5
    assert into_residual.std().item() == pytest.approx(std, rel=0.02)


def test_plain_peak_is_what_the_iterations_allocate() -> None:
    memory = PlainMemory("cpu")
    with torch.device("meta"):
        model = torch.nn.Linear(64, 64, bias=False)
    memory.place(model)
    for size in (1 << 20, 3 << 20)[:MEASURED_ITERATIONS]:
        with memory.iteration():
            first = torch.empty(size, dtype=torch.uint8)
            second = torch.empty(size, dtype=torch.uint8)
            del first, second
    report = memory.report()
    assert report.peak_bytes == {"device": 64 * 64 * 4 + 2 * (3 << 20), "host": 0, "disk": 0}
    assert report.needed_bytes == report.peak_bytes["device"]


def _content() -> dict[str, Any]:
    return {
        "format": "test",
        "floats": torch.randn(1000, 3),
        "scalar": torch.tensor(2.5),
        "nested": {0: [torch.arange(5), (1, None, True, "x", 0.1)]},
        "half": torch.ones(7, dtype=torch.bfloat16),
        "strided": torch.arange(12).view(3, 4).t(),
        "empty": torch.empty(0),
    }


def test_checkpoint_holds_ordinary_tensors(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    content = _content()
    save_checkpoint(path, content)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for loaded in (load_checkpoint(path), torch.load(path, weights_only=True)):
        assert loaded.keys() == content.keys()
        for name in ("floats", "scalar", "half", "strided", "empty"):
            assert type(loaded[name]) is torch.Tensor
            assert loaded[name].dtype == content[name].dtype
            assert torch.equal(loaded[name], content[name])
        assert torch.equal(loaded["nested"][0][0], torch.arange(5))
        assert loaded["nested"][0][1] == (1, None, True, "x", 0.1)


def test_failed_save_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"older")

    def fail(descriptor: int) -> None:
        raise OSError("disk is full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk is full"):
        save_checkpoint(path, _content())
    assert path.read_bytes() == b"older"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("hello")
    foreign = tmp_path / "foreign.pt"
    torch.save({"weights": torch.ones(3)}, foreign)
    cut = tmp_path / "cut.pt"
    save_checkpoint(cut, _content())
    cut.write_bytes(cut.read_bytes()[:5000])
    for path in (text, foreign, cut, tmp_path / "missing", tmp_path):
        with pytest.raises(UsageError, match="--resume="):
            load_checkpoint(path)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    content = _content()
    save_checkpoint(path, content)
    whole = path.read_bytes()
    at = whole.index(content["floats"].numpy().tobytes()[:64])
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(UsageError, match=r"is damaged.*data/0"):
        load_checkpoint(path)


def _run_record(name: str) -> dict[str, Any]:
    return {
        "losses": [5.5, 4.5],
        "final_parameters_sha256": "aa",
        "tokens_per_second": 100.0,
        "peak_bytes": {"device": 10, "host": 0, "disk": 0},
        "budget_bytes": None if name == "plain" else {"device": 20, "host": 0, "disk": 0},
        "needed_bytes": 10,
        "max_rss_bytes": 1,
    }


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, 0),
        ({"losses": [5.5, 4.5000001]}, 1),
        ({"losses": [5.5, float("nan")]}, 1),
        ({"final_parameters_sha256": "ab"}, 1),
    ],
)
def test_comparison_fails_on_any_difference(
    change: dict[str, Any], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, *_: Any) -> dict[str, Any]:
        return {**_run_record(name), **(change if name == "paged" else {})}

    monkeypatch.setattr(compare_module, "_run", run)
    options = parse_options(["--compare", "--device-budget=200%"])
    assert compare(Path("train_lm.py"), options) == code


def test_a_child_that_dies_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os; os.kill(os.getpid(), 9)")
    options = parse_options(["--compare", "--device-budget=1MiB"])
    with pytest.raises(ChildError, match="plain run ended with signal 9"):
        compare(script, options)
