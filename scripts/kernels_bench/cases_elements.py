"""Cases that pass once over elements: 8 bits."""

from __future__ import annotations

import torch

from tensorpager.kernels.quantize import (
    dequantize,
    dequantize_reference,
    quantize,
    quantize_reference,
)

from .case import Case, Job, Setting, Work, same
from .pages import BlockwisePages, Pages


def _quantize(setting: Setting) -> Job:
    values = setting.randn(setting.elements(torch.float32))
    source = Pages(values, setting.page_bytes)
    states = BlockwisePages(torch.zeros_like(values), setting, root=False)

    return Job(
        run=lambda: quantize([source.paged], [states.state], root=False),
        expect=lambda: quantize_reference([values], [states.dense], False),
        compare=lambda: states.compare("states"),
        work=Work(values.nbytes + states.nbytes),
    )


def _dequantize(setting: Setting) -> Job:
    values = setting.randn(setting.elements(torch.float32)).square_()
    states = BlockwisePages(values, setting, root=True)
    out = Pages(torch.zeros_like(values), setting.page_bytes)
    return Job(
        run=lambda: dequantize([states.state], [out.paged], root=True),
        expect=lambda: dequantize_reference([states.dense], [values], True),
        compare=lambda: same("values", out.read(), values),
        work=Work(values.nbytes + states.nbytes),
    )


ELEMENTS = (
    Case("quantize", frozenset({"quantize.convert"}), "", _quantize),
    Case("dequantize", frozenset({"quantize.convert"}), "", _dequantize),
)
