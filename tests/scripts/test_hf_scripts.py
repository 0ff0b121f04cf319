"""make_tiny_model.py, finetune_hf.py and generate.py, one after another, as users do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.run

pytest.importorskip("transformers")
pytest.importorskip("peft")

import finetune_hf
import generate
import make_tiny_model

from .. import programs

TIGHT = ["--host-budget=24MiB", "--page-size=64KiB", "--device=cpu"]
TRAINING = ["--steps=4", "--batch=2", "--length=64", "--accumulate=2", "--lr=1e-3"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """0.9 M parameters, 3.5 MiB; 24 texts of many lengths beside it."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model.main([str(folder), "--width=128", "--layers=4", "--texts=24", "--tied"])
    return folder


def tune(model: Path, output: Path, *more: str) -> dict[str, Any]:
    record = output.with_suffix(".json")
    arguments = [str(model), str(model / "texts.jsonl"), f"--output={output}", f"--json={record}"]
    assert finetune_hf.main([*arguments, *TRAINING, *more]) == 0
    found: dict[str, Any] = json.loads(record.read_text())
    return found


def test_the_whole_model(model: Path, tmp_path: Path) -> None:
    plain = tune(model, tmp_path / "plain", "--no-pager", "--device=cpu")
    paged = tune(model, tmp_path / "paged", "--device-budget=8MiB", *TIGHT)
    assert paged["losses"] == plain["losses"]
    assert len(paged["losses"]) == 4
    assert paged["faults"] > 0
    assert all(paged["peak_bytes"][t] <= b for t, b in paged["budget_bytes"].items())
    name = "model.safetensors"
    assert (tmp_path / "paged" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    assert (tmp_path / "paged" / "tokenizer.json").is_file()


@pytest.mark.slow
def test_a_training_that_goes_on_in_a_new_process(model: Path, tmp_path: Path) -> None:
    tune(model, tmp_path / "whole", "--device-budget=8MiB", "--save-steps=2", *TIGHT)
    ended = programs.run(
        finetune_hf.__file__,
        *(str(model), str(model / "texts.jsonl"), f"--output={tmp_path / 'rest'}"),
        *(*TRAINING, "--device-budget=8MiB", "--save-steps=2", *TIGHT),
        f"--resume={tmp_path / 'whole' / 'checkpoint-2'}",
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    names = "model.safetensors", "checkpoint-4/model.safetensors", "checkpoint-4/scheduler.pt"
    for name in names:
        assert (tmp_path / "rest" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.slow
def test_ranks_of_torchrun_train_one_model(model: Path, tmp_path: Path) -> None:
    """One of them prints and writes, and the losses are those without us."""
    found = []
    for memory in (
        ["--no-pager", "--device=cpu"],
        ["--device-budget=16MiB", *TIGHT, "--host-budget=64MiB"],
    ):
        record = tmp_path / f"{len(found)}.json"
        ended = programs.run(
            *(torch.distributed.run.__file__, "--standalone", "--nproc-per-node=2"),
            *(finetune_hf.__file__, str(model), str(model / "texts.jsonl"), *TRAINING, *memory),
            *(f"--output={tmp_path / record.stem}", f"--json={record}"),
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert ended.stdout.count("4 steps in") == 1, ended.stdout
        found.append(json.loads(record.read_text()))
    plain, paged = found
    assert paged["losses"] == plain["losses"]
    assert len(paged["ranks"]) == 2
    for rank in paged["ranks"]:
        assert rank["faults"] > 0
        assert all(rank["peak_bytes"][t] <= b for t, b in rank["budget_bytes"].items())
    weights = [(tmp_path / f"{n}" / "model.safetensors").read_bytes() for n in range(2)]
    assert weights[0] == weights[1]


@pytest.mark.filterwarnings("error::FutureWarning")  # peft's would be on the user's terminal
def test_adapters_and_generation(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tune(model, tmp_path / "plain", "--lora=4", "--no-pager", "--device=cpu")
    paged = tune(model, tmp_path / "paged", "--lora=4", "--device-budget=3500KiB", *TIGHT)
    assert paged["losses"] == plain["losses"]
    assert paged["faults"] > 0
    capsys.readouterr()
    texts = []
    for memory in (["--no-pager", "--device=cpu"], ["--device-budget=3MiB", *TIGHT]):
        prompts = ["--prompt=The page", "--prompt=A slot of the host", "--tokens=12", "--sample"]
        adapter = f"--adapter={tmp_path / 'paged'}"
        assert generate.main([str(model), *prompts, adapter, *memory]) == 0
        lines = capsys.readouterr().out.splitlines()
        texts.append([line for line in lines if not line.startswith(("--", "device:", "host:"))])
        told = [line for line in lines if line.startswith("-- ")]
        assert len(told) == 2
        assert all(("came in" in line) == ("--no-pager" not in memory) for line in told)
    assert texts[1] == texts[0]
    assert any("The page" in line for line in texts[0])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"text": "one"}\n{"txt": "two"}\n', 'line 2 has neither a "text" nor "messages"'),
        ("{not json}\n", "line 1 is not JSON"),
        ("", "holds no text"),
    ],
)
def test_data_that_cannot_be_read(
    text: str, told: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(text)
    arguments = [str(model), str(data), f"--output={tmp_path}", "--device-budget=8MiB", *TIGHT]
    assert finetune_hf.main(arguments) == 1
    assert told in capsys.readouterr().out


def test_kinds_of_data(model: Path, tmp_path: Path) -> None:
    tokenizer = make_tiny_model.make_tokenizer()
    notes = tmp_path / "notes.txt"
    notes.write_text("One.\n\nTwo,\nin two lines.\n\n\n")
    assert finetune_hf.read_texts(notes, tokenizer) == ["One.", "Two,\nin two lines."]
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps({"messages": [{"role": "user", "content": "Hé"}]}) + "\n\n")
    (text,) = finetune_hf.read_texts(chat, tokenizer)
    assert text == "<s>user\nHé</s>"
    (row,) = finetune_hf.tokenize([text], tokenizer, 64)
    assert row["input_ids"][0] == tokenizer.bos_token_id
    assert row["input_ids"].count(tokenizer.eos_token_id) == 1
    batch = finetune_hf.Pad(0)([{"input_ids": [5, 6]}, {"input_ids": [7]}])
    assert batch["labels"].tolist() == [[5, 6], [7, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]


def test_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for main, arguments, told in (
        (finetune_hf.main, [str(tmp_path / "no"), "x", "--output=y"], "make_tiny_model.py"),
        (generate.main, [str(tmp_path / "no"), "--prompt=x"], "make_tiny_model.py"),
        (make_tiny_model.main, [str(tmp_path / "new"), "--width=100"], "8 is the smallest"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert told in " ".join(capsys.readouterr().err.split())
