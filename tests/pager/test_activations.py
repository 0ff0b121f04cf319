"""What autograd saves goes into pages and comes back: the same gradients as without a pager."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tensorpager as tp

from .models import ByAddress, World, assert_same, batch, mlp, plain, train


def _grads(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters()}


# -- what is stored ------------------------------------------------------------------------------
def test_tensors_cut_from_one_projection_are_stored_once(tight_pager: tp.Pager) -> None:
    x = torch.randn(64, 768, requires_grad=True)  # 192 KiB, 3 pages
    with tight_pager.iteration():
        q, k, v = (x * 1.0).chunk(3, dim=1)
        loss = (q * k).sum() + (k * v).sum() + (v * q).sum()
        assert tight_pager.core.space.kind_pages["activation"] == 3
        loss.backward()
    q, k, v = x.detach().chunk(3, dim=1)
    assert_same(x.grad, torch.cat([k + v, q + v, k + q], dim=1))


def test_one_input_of_three_layers_is_stored_once(tight_pager: tp.Pager) -> None:
    layers = [nn.Linear(256, 8) for _ in range(3)]
    x = torch.randn(128, 256)  # 2 pages
    with tight_pager.iteration():
        loss = sum(layer(x).sum() for layer in layers)
        assert tight_pager.core.space.kind_pages["activation"] == 2
        loss.backward()


def test_an_address_used_again_is_another_tensor(same) -> None:
    def script(world: World) -> object:
        weight = nn.Parameter(torch.randn(128, 128))
        memory = np.empty((128, 128), np.float32)
        pages_it = world.pager is not None and not world.pager.core.fits
        with world.iteration():
            losses = []
            for step in range(4):
                if not pages_it:
                    memory = np.empty_like(memory)  # without paging the graph keeps what it saved
                memory[:] = step
                x = torch.from_numpy(memory)  # another tensor, another storage, the same address
                losses.append((x * weight).sum())
                del x
            sum(losses).backward()
        return weight.grad

    same(script, pressed=True)


def test_a_changed_tensor_is_stored_again(same) -> None:
    def script(world: World) -> object:
        weight = nn.Parameter(torch.randn(128, 128))
        x = torch.randn(128, 128)
        with world.iteration():
            first = (x.clone() * weight).sum()
            other = x.clone()
            second = (other * weight).sum()
            second.backward()
            other.mul_(2)
            third = (other * weight).sum()
            (first + third).backward()
        return weight.grad

    same(script, pressed=True)


def test_pieces_with_versions_of_their_own(same) -> None:
    """``unsafe_chunk`` gives pieces of one storage that each count their own changes."""

    def script(world: World) -> object:
        x = torch.randn(128, 512, requires_grad=True)
        with world.iteration():
            pieces = (x * 1.0).unsafe_chunk(4, dim=1)
            out = pieces[0].sigmoid_() + pieces[1].sigmoid_() * pieces[2].tanh_()
            (out * pieces[3].sigmoid_()).sum().backward()
        return x.grad

    same(script, pressed=True)


def test_noise_that_is_filled_after_it_was_saved(same) -> None:
    def script(world: World) -> object:
        x = torch.randn(128, 256, requires_grad=True)
        with world.iteration():
            F.rrelu(x * 1.0, training=True).square().sum().backward()
        return x.grad

    same(script, pressed=True)


def test_values_changed_through_data_are_stored_again(same) -> None:
    """``.data`` has a version counter of its own."""

    def script(world: World) -> object:
        weight = nn.Parameter(torch.ones(128, 128))
        x = torch.randn(128, 128)
        with world.iteration():
            kept = (x * weight).sum()
            kept.backward(retain_graph=True)
            x.data.mul_(3)
            weight.grad = None
            (x * weight).sum().backward()
        return weight.grad

    same(script, pressed=True)


# -- changes in place ----------------------------------------------------------------------------
def test_change_of_a_small_saved_tensor_raises_as_pytorch_does(lane_pager: tp.Pager) -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(8, 8)
    with lane_pager.iteration():
        loss = (x * weight).sum()
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_change_of_a_paged_parameter_raises_as_pytorch_does(lane_pager: tp.Pager) -> None:
    model = lane_pager.page_module(mlp())
    with lane_pager.iteration():
        loss = model(batch()[0]).sum()
        with torch.no_grad():
            model[2].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_change_of_a_stored_tensor_gives_the_values_of_save_time(tight_pager: tp.Pager) -> None:
    weight = torch.randn(128, 128, requires_grad=True)
    x = torch.randn(128, 128)
    before = x.clone()
    with tight_pager.iteration():
        loss = (x * weight).sum()
        x.add_(1)
        loss.backward()
    assert_same(weight.grad, before)


# -- ways through the graph ----------------------------------------------------------------------
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(same, use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(128, 256)
            self.middle = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.2))
            self.last = nn.Linear(256, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            x = checkpoint(self.middle, x, use_reentrant=use_reentrant)
            return self.last(x)

    def script(world: World) -> object:
        model = world.module(Checkpointed())
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        return train(world, model, optimizer), model

    same(script)


@pytest.mark.parametrize("how", ["grad", "backward"])
def test_checkpoint_in_a_backward_pass_for_weights(same, how: str) -> None:
    """PyTorch asks a paged weight before it differentiates by it; what then runs again (the linear,
    with the nodes of the first time) is as in any other backward pass."""

    def script(world: World) -> object:
        weight = world.module(nn.Linear(256, 256, bias=False)).weight
        x = torch.randn(512, 256, requires_grad=True)

        def twice(x: torch.Tensor) -> torch.Tensor:
            return F.linear(F.linear(x, weight).tanh(), weight)

        with world.iteration():
            loss = checkpoint(twice, x.sin(), use_reentrant=False).square().mean()
            if how == "grad":
                (slope,) = torch.autograd.grad(loss, [weight], create_graph=True)
                (loss + slope.square().sum()).backward()
            else:
                torch.autograd.backward(loss, inputs=[weight])
        return loss, weight.grad, x.grad

    same(script, frames=16)


@pytest.mark.parametrize("inside", [True, False])
def test_double_backward_by_grad(same, inside: bool) -> None:
    def penalty(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y.square().mean() + (slope.norm(dim=1) - 1).square().mean()).backward()

    def script(world: World) -> object:
        model = world.module(mlp(depth=4))
        x = torch.randn(128, 128, requires_grad=True)
        with world.iteration():
            y = model(x)
            if inside:
                penalty(model, x, y)
        if not inside:
            penalty(model, x, y)
        return model, x.grad

    same(script)


def test_gradients_that_have_a_graph(same) -> None:
    """``backward(create_graph=True)``: ``.grad`` can be differentiated again."""

    def script(world: World) -> object:
        model = world.module(mlp(depth=4))
        with world.iteration():
            model(batch()[0]).square().mean().backward(create_graph=True)
            first = [p.grad for p in model.parameters()]
            assert all(grad.requires_grad for grad in first)
            for parameter in model.parameters():
                parameter.grad = None
            sum(grad.square().sum() for grad in first).backward()
        result = plain(model)
        del first
        for parameter in model.parameters():  # the cycle that PyTorch warns of
            parameter.grad = None
        return result

    same(script)


def test_backward_outside_of_the_block(same) -> None:
    def script(world: World) -> object:
        model = world.module(mlp(depth=4))
        with world.iteration():
            loss = model(batch()[0]).square().mean()
        loss.backward()
        return model

    same(script)


def test_backward_twice_over_a_retained_graph(same) -> None:
    def script(world: World) -> object:
        model = world.module(mlp(depth=4))
        with world.iteration():
            loss = model(batch()[0]).square().mean()
            loss.backward(retain_graph=True)
            first = plain(_grads(model))
            loss.backward()
        return first, model

    same(script)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        y = x.pow(2)
        ctx.save_for_backward(x, y, weight)
        return y * x * weight

    @staticmethod
    def backward(ctx, grad):
        x, y, weight = ctx.saved_tensors
        return 3 * y * weight * grad, (y * x * grad).sum(0)


def test_function_that_saves_tensors(same) -> None:
    def script(world: World) -> object:
        model = world.module(nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 256)))
        scale = world.page(torch.randn(256, requires_grad=True))
        with world.iteration():
            h = _Cube.apply(model(batch(128)[0]), scale)
            _Cube.apply(h, scale).mean().backward()
        return model, scale.grad

    same(script, pressed=True)


def test_kernels_of_others_read_what_they_have_saved(same) -> None:
    def script(world: World) -> object:
        model = world.module(nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 256)))
        with world.iteration():
            h = ByAddress.apply(model(batch(128)[0]))
            ByAddress.apply(h).mean().backward()
        return model

    same(script, pressed=True)


SAVED = {
    "transposed": lambda x, z: x.t() * x.t().clone(),
    "expanded": lambda x, z: x[:1].expand(256, -1) * x[0].exp(),
    "sliced": lambda x, z: x[:, ::2] * x[:, 1::2],
    "few rows": lambda x, z: x[:48] * x[48:96].exp(),
    "few columns": lambda x, z: x[:, :32] * x[:, 32:64],
    "overlapping windows": lambda x, z: x.unfold(1, 4, 1) * x.unfold(1, 4, 1).exp(),
    "as_strided": lambda x, z: x.as_strided((256, 128), (2, 3), 5).square(),
    "complex": lambda x, z: (z * z.exp()).abs(),
    "conj": lambda x, z: (z.conj() * z).abs(),
    "few rows, conj": lambda x, z: (z[:24].conj() * z[24:48]).abs(),
    "negated": lambda x, z: z.conj().imag.square(),
    "few rows, negated": lambda x, z: z.conj().imag[:64].square(),
    "real view": lambda x, z: torch.view_as_real(z).square(),
    "other dtype": lambda x, z: x.bfloat16().float() * x.half().float(),
    "indexed": lambda x, z: x[torch.arange(0, 256, 3)].square(),
    "masked": lambda x, z: x[x > 0].square(),
    "top": lambda x, z: x.topk(64, dim=1).values.square(),
    "channels last": lambda x, z: (
        x.view(8, 16, 16, 32).to(memory_format=torch.channels_last).square()
    ),
}


@pytest.mark.parametrize("name", list(SAVED))
def test_saved_geometry(same, name: str) -> None:
    def script(world: World) -> object:
        x = torch.randn(256, 256, requires_grad=True)
        with world.iteration():
            base = x * 1.0
            SAVED[name](base, torch.complex(base, base.exp())).sum().backward()
        return x.grad

    same(script, pressed=True)
