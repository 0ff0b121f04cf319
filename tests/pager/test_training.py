"""The same training script, plain and paged, gives the same losses, parameters and states."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tensorpager as tp

from .models import World, batch, compare_runs, loss_of, make_pager, mlp, train

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "adamw-amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-3, amsgrad=True),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "adamw-loop": lambda params: torch.optim.AdamW(
        params, lr=1e-3, foreach=False, differentiable=False
    ),
    "adam-tensor-lr": lambda params: torch.optim.Adam(params, lr=torch.tensor(1e-3)),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "sgd-foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "sgd-fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "muon": lambda params: torch.optim.Muon([p for p in params if p.dim() == 2]),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_optimizer(same, name: str) -> None:
    """Each against the plain run with the very same options: on the CPU foreach and fused give the
    bits of the paged run too, which takes one parameter at a time."""

    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(OPTIMIZERS[name](model.parameters()))
        return train(world, model, optimizer, 10), model, optimizer

    same(script)


def test_disk_tier(one_thread, tmp_path) -> None:
    with make_pager(host_budget="512KiB", disk_budget="16MiB", disk_path=tmp_path) as pager:
        test_optimizer(lambda script: compare_runs(script, World(pager)), "adamw")
        assert pager.stats()["disk_bytes_written"] > 0


def test_gradients_much_smaller_than_a_page_stay_dense(same) -> None:
    """They are clipped and added to beside those in pages, and count as dense memory."""

    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        norms = []
        for _ in range(6):
            with world.iteration():
                for _ in range(2):
                    loss_of(model).backward()
                if world.pager is not None and not world.pager.core.fits:
                    for parameter in model.parameters():
                        small = 64 * parameter.nbytes <= world.pager.page_size
                        assert (type(parameter.grad) is torch.Tensor) is small
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
                optimizer.step()
                optimizer.zero_grad()
        return norms, model, optimizer

    same(script)


# -- making models and optimizers ----------------------------------------------------------------
def test_meta_model_initialised_in_place(same) -> None:
    def script(world: World) -> object:
        with torch.device("meta" if world.pager is not None else "cpu"):
            model = mlp()
        model = world.module(model)
        torch.manual_seed(3)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.normal_(module.bias)
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        return train(world, model, optimizer), model

    same(script)


def test_optimizer_made_before_the_model_is_paged(same) -> None:
    def script(world: World) -> object:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loss_of(model).backward()
        optimizer.step()
        model = world.module(model)
        optimizer = world.optimizer(optimizer)
        return train(world, model, optimizer), model, optimizer

    same(script)


# -- gradients -----------------------------------------------------------------------------------
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_add_up(same, blocks: int, set_to_none: bool) -> None:
    """Over several backward passes, in one iteration or in one each."""

    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        losses = []
        for _ in range(3):
            for _ in range(blocks):
                with world.iteration():
                    for _ in range(3 // blocks):
                        loss = loss_of(model) / 3
                        loss.backward()
                        losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return losses, model, optimizer

    same(script)


CLIPPERS = {
    "norm": lambda params: nn.utils.clip_grad_norm_(params, 0.1),
    "max norm": lambda params: nn.utils.clip_grad_norm_(params, 0.1, norm_type=float("inf")),
    "norm foreach": lambda params: nn.utils.clip_grad_norm_(params, 0.1, foreach=True),
    "value": lambda params: nn.utils.clip_grad_value_(params, 1e-3),
    "value foreach": lambda params: nn.utils.clip_grad_value_(params, 1e-3, foreach=True),
}


@pytest.mark.parametrize("name", list(CLIPPERS))
def test_clipping(same, name: str) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        results = []
        for _ in range(3):
            with world.iteration():
                loss = loss_of(model)
                loss.backward()
                norm = CLIPPERS[name](model.parameters())
                optimizer.step()
                optimizer.zero_grad()
            results.append((loss, norm))
        return results, model

    same(script)


def test_groups_with_options_of_their_own_and_one_added_later(same) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        head = list(model[-1].parameters())
        rest = [p for p in model.parameters() if not any(p is q for q in head)]
        groups = [
            {"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0, "lr": 1e-2},
        ]
        optimizer = world.optimizer(torch.optim.AdamW(groups))
        losses = train(world, model, optimizer, 2)
        optimizer.add_param_group({"params": head, "lr": 3e-3})
        return losses, train(world, model, optimizer, 2), model, optimizer

    same(script)


def test_named_parameters_in_the_optimizer(same) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(torch.optim.AdamW(model.named_parameters()))
        return train(world, model, optimizer), optimizer

    same(script)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 128)
        self.mix = nn.Linear(128, 128)
        self.head = nn.Linear(128, 500, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.table((x[:, 0].abs() * 500).long() % 500)).relu())


def test_tied_weights(same) -> None:
    def script(world: World) -> object:
        model = world.module(_Tied())
        assert model.head.weight is model.table.weight
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        return train(world, model, optimizer), model, optimizer

    same(script)


def test_frozen_parameters_unfrozen_later(same) -> None:
    def script(world: World) -> object:
        model = mlp()
        model[0].requires_grad_(False)
        model[2].weight.requires_grad_(False)
        model = world.module(model)
        assert not model[2].weight.requires_grad
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        losses = train(world, model, optimizer, 2)
        model.requires_grad_(True)
        with world.iteration():
            loss_of(model).backward()
        if world.pager is not None and not world.pager.core.fits:
            assert isinstance(model[2].weight.grad, tp.PagedTensor)
        optimizer.step()
        optimizer.zero_grad()
        model[4].requires_grad_(False)
        losses += train(world, model, optimizer, 2)
        model[4].requires_grad_(True)
        return losses, train(world, model, optimizer, 2), model, optimizer

    same(script)


# -- step ----------------------------------------------------------------------------------------
def test_closure(same) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        inputs, labels = batch()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            return loss

        losses = []
        for _ in range(3):
            with world.iteration():
                losses.append(optimizer.step(closure).item())
        return losses, model

    same(script)


def test_step_hooks_run_once_per_step(same) -> None:
    def script(world: World) -> object:
        model = world.module(mlp())
        optimizer = torch.optim.AdamW(model.parameters())
        seen: list[str] = []
        optimizer.register_step_pre_hook(lambda opt, args, kwargs: seen.append("pre, early"))
        optimizer = world.optimizer(optimizer)
        optimizer.register_step_pre_hook(lambda opt, args, kwargs: seen.append("pre"))
        optimizer.register_step_post_hook(lambda opt, args, kwargs: seen.append("post"))
        train(world, model, optimizer, 2)
        assert seen == ["pre, early", "pre", "post"] * 2
        return model

    same(script)


def test_params_that_share_an_optimizer_class(same) -> None:
    def script(world: World) -> object:
        models = [world.module(mlp()) for _ in range(2)]
        optimizers = [world.optimizer(torch.optim.AdamW(m.parameters())) for m in models]
        return [train(world, m, o, 2) for m, o in zip(models, optimizers)], models

    same(script)
