"""transformers and accelerate on paged models. Importing them takes seconds: few tests, here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorpager as tp

from .models import World, assert_same, compare_runs, make_pager, mlp, plain, run_again


@pytest.fixture
def accelerate() -> Iterator[Any]:
    module = pytest.importorskip("accelerate")
    yield module
    module.state.AcceleratorState._reset_state(reset_partial_state=True)  # which is the process's


def model_of(kind: str, **changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    shape = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": kind == "Llama",
    }
    if kind == "Mixtral":  # whose weights are cut in pieces to be saved
        shape["num_local_experts"] = 2
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(shape | changes))
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def test_blocks_that_fill_a_cache_run_again(one_thread) -> None:
    """As models of transformers do in training, unless they are told not to."""

    def script(world: World) -> object:
        model = world.module(model_of("Llama", num_hidden_layers=3))
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        losses = []
        for _ in range(4):
            tokens = torch.randint(256, (4, 96))
            with world.iteration():
                out = model(tokens, labels=tokens)
                assert out.past_key_values.get_seq_length() == 96
                out.loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(out.loss.item())
        return losses, model

    with make_pager(policy="joint", frames=60) as pager:
        run_again(pager.core)
        compare_runs(script, World(pager), must_move=False)
        assert not pager.core.follower.segments.refused
        assert pager.stats()["reruns"] == 4 * 3


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["Llama", pytest.param("Mixtral", marks=pytest.mark.slow)])
def test_save_pretrained(kind: str, tmp_path: Path, accelerate: Any) -> None:
    """The same files, whole and in shards, and by accelerate; loaded again they are the model."""
    with make_pager() as pager:
        for name, model in (
            ("plain", model_of(kind)),
            ("paged", pager.page_module(model_of(kind))),
        ):
            model.save_pretrained(tmp_path / "whole" / name)
            model.save_pretrained(tmp_path / "shards" / name, max_shard_size="100KB")
            accelerate.Accelerator(cpu=True).save_model(model, tmp_path / "accelerate" / name)
        for way in ("whole", "shards", "accelerate"):
            files = files_in(tmp_path / way / "plain")
            assert files == files_in(tmp_path / way / "paged"), way
            assert len(files) > 3 if way == "shards" else "model.safetensors" in files
        loaded = type(model).from_pretrained(tmp_path / "whole" / "paged", local_files_only=True)
        for name, parameter in model.named_parameters():
            assert type(parameter) is tp.PagedTensor
            assert torch.equal(parameter, loaded.get_parameter(name)), name


@pytest.mark.parametrize("prepared_first", [True, False])
def test_a_prepared_optimizer(prepared_first: bool, accelerate: Any, tmp_path: Path) -> None:
    """Accelerate's wrapper steps on pages, with its scheduler, clipping and its GradScaler; its own
    checkpoint is loaded again."""
    ends = []
    for pager in (None, make_pager()):
        torch.manual_seed(5)
        model = mlp(64, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        accelerator = accelerate.Accelerator(cpu=True)
        if pager is not None and not prepared_first:
            pager.page_module(model)
            pager.optimizer(optimizer)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        if pager is not None and prepared_first:
            pager.page_module(model)
            assert pager.optimizer(optimizer) is optimizer
        steps(pager, accelerator, model, optimizer, scheduler, 2)
        accelerator.save_state(tmp_path / f"{pager is None}")
        middle = plain([model, optimizer])
        steps(pager, accelerator, model, optimizer, scheduler, 1)
        accelerator.load_state(tmp_path / f"{pager is None}")
        assert_same(plain([model, optimizer])[1], middle[1])
        steps(pager, accelerator, model, optimizer, scheduler, 1)
        ends.append(plain([model.state_dict(), optimizer.state_dict()]))
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        if pager is not None:
            pager.close()
    assert_same(*ends)
    folders = [files_in(tmp_path / name) for name in ("True", "False")]
    assert folders[0]["model.safetensors"] == folders[1]["model.safetensors"]


def steps(
    pager: tp.Pager | None, accelerator: Any, model: Any, optimizer: Any, scheduler: Any, count: int
) -> None:
    for _ in range(count):
        with pager.iteration() if pager is not None else nullcontext():
            accelerator.backward(model(torch.ones(4, 128)).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def test_a_prepared_optimizer_with_a_scaler(accelerate: Any) -> None:
    accelerate.Accelerator(cpu=True)
    model = mlp()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    wrapper = accelerate.optimizer.AcceleratedOptimizer(inner, scaler=torch.amp.GradScaler("cpu"))

    def step() -> None:
        wrapper.scaler.scale(model(torch.ones(4, 128)).square().mean()).backward()
        wrapper.step()
        assert not wrapper.step_was_skipped
        wrapper.zero_grad()

    step()
    with make_pager() as pager:
        pager.page_module(model)
        pager.optimizer(wrapper)
        step()
        pager.optimizer(wrapper)
        step()
        assert all(s["step"] == 3 for s in inner.state.values())
        assert type(inner.state[model[0].weight]["exp_avg"]) is tp.PagedTensor
