"""``tensorpager.hf`` and ``tensorpager.lightning`` load their libraries when they are asked for."""

from __future__ import annotations

from ... import programs

CODE = """
import sys
for name in ("transformers", "accelerate", "lightning"):
    sys.modules[name] = None
import tensorpager as tp
tp.Pager(device_budget="8MiB", device="cpu").close()
for what, extra in (("hf.attach", "hf"), ("hf.prepare", "hf"), ("hf.from_pretrained", "hf"),
                    ("lightning", "lightning")):
    try:
        eval(f"tp.{what}")
    except ImportError as error:
        assert f"pip install 'tensorpager[{extra}]'" in str(error), error
    else:
        raise AssertionError(what)
try:
    tp.hf.attachh
except AttributeError as error:
    assert "attachh" in str(error)
assert set(dir(tp.hf)) >= {"attach", "prepare", "from_pretrained", "TensorPagerCallback"}
"""


def test_a_library_that_is_missing_is_named() -> None:
    ended = programs.run("-c", CODE)
    assert ended.returncode == 0, ended.stderr
