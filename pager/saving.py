"""``state_dict`` of all that a pager pages, as ordinary tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .paged_tensor import PagedTensor
from .plain_copies import dense_twin

if TYPE_CHECKING:
    from .runtime import Pager


def state_dict(pager: Pager) -> dict[str, Any]:
    """See ``Pager.state_dict``."""
    models = [m() for m in pager.models]
    optimizers = [o() for o in pager.optimizers]
    return {
        "models": [_dense_tree(m.state_dict()) for m in models if m is not None],
        "optimizers": [_dense_tree(o.state_dict()) for o in optimizers if o is not None],
    }


def load_state_dict(pager: Pager, state: dict[str, Any]) -> None:
    """See ``Pager.load_state_dict``."""
    for name, owners in (("models", pager.models), ("optimizers", pager.optimizers)):
        live = [o for ref in owners if (o := ref()) is not None]
        if len(state[name]) != len(live):
            raise ValueError(
                f"the state has {len(state[name])} {name} and this pager {len(live)}; page the "
                "same ones in the same order first"
            )
        for owner, part in zip(live, state[name]):
            owner.load_state_dict(part)


def _dense_tree(tree: Any) -> Any:
    if type(tree) is PagedTensor:
        return dense_twin(tree).detach()
    if isinstance(tree, dict):
        return {key: _dense_tree(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_dense_tree(value) for value in tree)
    return tree
