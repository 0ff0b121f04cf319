"""What programs that know no pages do with tensors and modules: each call gives what it gives of
plain ones, or a refusal that names the tensor, the call and the remedy."""

import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import func, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad, functional
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune, stateless
from torch.optim import swa_utils
from torch.utils import data, dlpack
from torch.utils.flop_counter import FlopCounterMode

import tensorpager as tp

from .interop import same
from .lanes import CHAOS, OPEN

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.linspace(-1, 1, 24).view(4, 6)
Model = nn.Module
Tensor = torch.Tensor


def weights(m: Model) -> dict[str, Tensor]:
    return dict(m.named_parameters())


def of_weights(m: Model) -> Callable[[Any], Tensor]:
    return lambda given: func.functional_call(m, given, (X,)).sum(0)


def loaded(file: io.BytesIO, **options: Any) -> Any:
    file.seek(0)
    return torch.load(file, **options)


def saved_module(t: Tensor, w: Tensor, m: Model) -> Tensor:
    file = io.BytesIO()
    torch.save(m, file)
    return loaded(file, weights_only=False)(X)


def parametrized(t: Tensor, w: Tensor, m: Model) -> list[Tensor]:
    parametrize.register_parametrization(m[0], "weight", nn.Tanh())
    first = m(X)
    parametrize.remove_parametrizations(m[0], "weight")
    return [first, m(X)]


def spectral_norm(t: Tensor, w: Tensor, m: Model) -> Tensor:
    torch.manual_seed(3)
    nn.utils.spectral_norm(m[0])
    return parametrizations.spectral_norm(m[2])(m[0](X))


def pruned(t: Tensor, w: Tensor, m: Model) -> Tensor:
    prune.l1_unstructured(m[0], "weight", 0.5)
    m(X)
    prune.remove(m[0], "weight")
    return m(X)


def averaged(t: Tensor, w: Tensor, m: Model) -> Tensor:
    average = swa_utils.AveragedModel(m, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        average.update_parameters(m)
    return average(X)


def loaded_by_assignment(t: Tensor, w: Tensor, m: Model) -> list[Tensor]:
    other = model()
    other.load_state_dict(m.state_dict(), assign=True)
    m.load_state_dict(
        {name: value * 2 for name, value in model().state_dict().items()}, assign=True
    )
    return [other(X), m(X)]


def dual_numbers(t: Tensor, w: Tensor, m: Model) -> list[Tensor]:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(t, torch.ones_like(t))
        return [*forward_ad.unpack_dual(dual.sin() @ dual.t()), *forward_ad.unpack_dual(dual.exp())]


def counted(t: Tensor, w: Tensor, m: Model) -> int:
    with FlopCounterMode(display=False) as counter:
        m(X).sum().backward()
    return counter.get_total_flops()


def fakes(t: Tensor, w: Tensor, m: Model) -> list[int]:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return list(m(mode.from_tensor(X)).size())


def checked(t: Tensor, w: Tensor, m: Model) -> bool:
    double = w.detach().double()
    double = w.pager.page(double) if isinstance(w, tp.PagedTensor) else double
    return torch.autograd.gradcheck(
        lambda a: a.sin() @ a.t(), double.requires_grad_(), check_forward_ad=True
    )


# Of t [3, 4], w [3, 4] (a leaf that requires gradients), m (two linears): all paged, or all plain.
CALLS: dict[str, Callable[[Tensor, Tensor, Any], object]] = {
    "tensor of a list": lambda t, w, m: torch.tensor([t[0, 0], t[1, 1]]),
    "tensor of lists": lambda t, w, m: torch.tensor([[t[0, 0], 2.0], [t[1, 1], w[0, 1]]]),
    "tensor of vectors": lambda t, w, m: torch.tensor([t[0, :1], t[1, 1:2]], dtype=torch.float64),
    "tensor of integers": lambda t, w, m: torch.tensor([(t * 9).long()[0, 0], t[0, 0] > 0]),
    "tensor of a parameter": lambda t, w, m: torch.tensor([m[0].bias[0], m[0].bias[1]]),
    "as_tensor of a list": lambda t, w, m: torch.as_tensor([t[0, 0], t[1, 1].cfloat()]),
    "asarray of a list": lambda t, w, m: torch.asarray([t[0, 0], 1.0]),
    "Tensor of a list": lambda t, w, m: torch.Tensor([t[0, 0], t[1, 1]]),
    "new_tensor of a list": lambda t, w, m: t.new_tensor([t[0, 0], t[1, 1]]),
    "default_collate": lambda t, w, m: data.default_collate([{"a": t[0]}, {"a": t[1]}]),
    "DataLoader": lambda t, w, m: list(data.DataLoader(data.TensorDataset(t), batch_size=2)),
    "np.asarray": lambda t, w, m: np.asarray(t).tolist(),
    "from_dlpack with a copy": lambda t, w, m: torch.from_dlpack(t, copy=True),
    "pickled module": lambda t, w, m: pickle.loads(pickle.dumps(m))(X),
    "saved module": saved_module,
    "parametrize": parametrized,
    "orthogonal": lambda t, w, m: parametrizations.orthogonal(m[0])(X),
    "spectral_norm": spectral_norm,
    "prune": pruned,
    "AveragedModel": averaged,
    "load_state_dict with assign": loaded_by_assignment,
    "set_": lambda t, w, m: t.set_(torch.ones(3, 4)) + t,
    "stateless": lambda t, w, m: stateless.functional_call(m, {"0.weight": torch.ones(8, 6)}, (X,)),
    "vmap of a module": lambda t, w, m: torch.vmap(m)(X),
    "gradients per sample": lambda t, w, m: torch.vmap(
        func.grad(lambda given, x: func.functional_call(m, given, (x,)).sum()), (None, 0)
    )({name: value.detach() for name, value in weights(m).items()}, X),
    "stacked modules": lambda t, w, m: torch.vmap(
        lambda given: func.functional_call(m, given, (X,))
    )(func.stack_module_state([m, m])[0]),
    "jacfwd, captured": lambda t, w, m: func.jacfwd(lambda x: (x @ t).sin())(torch.ones(3)),
    "jacfwd of jacfwd": lambda t, w, m: func.jacfwd(func.jacfwd(lambda x: (x @ t).exp()))(X[0, :3]),
    "jacfwd of a module": lambda t, w, m: func.jacfwd(m)(X[0]),
    "jacfwd of weights": lambda t, w, m: func.jacfwd(of_weights(m))(weights(m)),
    "jacrev of weights": lambda t, w, m: func.jacrev(of_weights(m))(weights(m)),
    "jacrev of jacfwd": lambda t, w, m: func.jacrev(func.jacfwd(lambda x: (x @ w).sin()))(X[0, :3]),
    "hessian of a module": lambda t, w, m: func.hessian(lambda x: m(x).sum())(X[0]),
    "linearize": lambda t, w, m: func.linearize(m, X)[1](X),
    "dual numbers": dual_numbers,
    "gradcheck": checked,
    "functional.jacobian": lambda t, w, m: functional.jacobian(lambda a: X[:, :4] @ a.t(), w),
    "functional.hessian": lambda t, w, m: functional.hessian(lambda x: m(x).sum(), X[0]),
    "functional.jacobian, forward": lambda t, w, m: functional.jacobian(
        m, X, strategy="forward-mode", vectorize=True
    ),
    "functional.vhp": lambda t, w, m: functional.vhp(lambda a: F.linear(X[:, :4], a).sum(), w, t),
    "FlopCounterMode": counted,
    "FakeTensorMode": fakes,
    "make_fx": lambda t, w, m: make_fx(lambda x: m(x) @ m[2].weight)(X)(2 * X),
    "symbolic_trace": lambda t, w, m: torch.fx.symbolic_trace(m)(X),
    "script of a function": lambda t, w, m: torch.jit.script(scripted)(t),
}  # fmt: skip

# What is refused, and the tensor, or the module, that the refusal names.
REFUSED: dict[str, tuple[str, Callable[[Tensor, Tensor, Any], object]]] = {
    "to_dlpack": ("[3, 4]", lambda t, w, m: torch.to_dlpack(t)),
    "dlpack.to_dlpack": ("'0.weight'", lambda t, w, m: dlpack.to_dlpack(m[0].weight)),
    "np.from_dlpack": ("[3, 4]", lambda t, w, m: np.from_dlpack(t)),
    "data_ptr": ("'0.bias'", lambda t, w, m: m[0].bias.data_ptr()),
    "const_data_ptr": ("[3, 4]", lambda t, w, m: t.const_data_ptr()),
    "share_memory": ("'0.weight'", lambda t, w, m: m.share_memory()),
    "set_ of another shape": ("[3, 4]", lambda t, w, m: t.set_(torch.ones(3), 0, (2,))),
    "jit.trace": ("'0.weight'", lambda t, w, m: torch.jit.trace(m, X)),
    "jit.trace, captured": ("[3, 4]", lambda t, w, m: torch.jit.trace(lambda x: x + t, X[:3, :4])),
    "jit.script": ("'weight'", lambda t, w, m: torch.jit.script(m)),
    "jit.script of a part": ("Linear", lambda t, w, m: torch.jit.script(nn.Sequential(m[0]))),
    "jit.script of a buffer": ("'held'", lambda t, w, m: torch.jit.script(Holding(t))),
    "set_ to the storage": ("set_()", lambda t, w, m: X.clone().set_(t.untyped_storage())),
    "cond": ("[3, 4]", lambda t, w, m: torch.cond(X[0, 0] > 0, torch.sin, torch.cos, (t,))),
}  # fmt: skip


class Holding(nn.Module):
    def __init__(self, held: Tensor) -> None:
        super().__init__()
        self.register_buffer("held", held)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.held


def scripted(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def operands(pager: tp.Pager | None) -> tuple[Tensor, Tensor, nn.Sequential]:
    torch.manual_seed(1)
    values, m = torch.randn(3, 4), model()
    if pager is None:
        return values, values.clone().requires_grad_(), m
    return pager.page(values), pager.page(values).requires_grad_(), pager.page_module(m)


@pytest.fixture(params=[CHAOS, OPEN], ids=lambda lane: lane.name, autouse=True)
def lane(request, pager):
    with request.param.on(pager):
        yield request.param


@pytest.mark.parametrize("call", CALLS)
def test_as_of_plain_tensors(pager, call):
    expected = CALLS[call](*operands(None))
    same(expected, CALLS[call](*operands(pager)))


@pytest.mark.parametrize("call", REFUSED)
def test_refused_by_name(pager, call):
    named, action = REFUSED[call]
    given = operands(pager)
    with pytest.raises(tp.PagerError, match=f"(?s){re.escape(named)}.*(to_dense|pager|copy)"):
        action(*given)
