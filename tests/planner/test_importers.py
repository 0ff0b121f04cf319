"""Importers: public formats become the traces that they describe, and other files are refused."""

import gzip
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorpager.planner.errors import TraceError
from tensorpager.planner.importers import g10, torch_profiler, torch_snapshot
from tensorpager.planner.importers.block_lives import Blocks, Life, lives
from tensorpager.planner.importers.plain_pickle import load_plain
from tensorpager.planner.importers.shape_match import input_bytes
from tensorpager.planner.trace import READ, READWRITE, WRITE, Trace
from tensorpager.planner.trace_file import read_trace, write_trace

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"needs the public traces in {DATA}")
PAGE = 1000


def accesses(trace: Trace) -> list[tuple[int, int, int]]:
    """(op, tensor's number in the file, mode) of each access."""
    numbers = trace.tensor_ids[trace.access_tensor]
    return list(
        zip(trace.access_op.tolist(), numbers.tolist(), trace.access_mode.tolist(), strict=True)
    )


def bytes_in_use(trace: Trace) -> list[int]:
    """At each op, of the tensors that live there, [ops]."""
    use = np.zeros(trace.ops + 1, np.int64)
    lasting = trace.tensor_persistent
    np.add.at(use, np.where(lasting, 0, trace.first_op), trace.tensor_bytes)
    np.subtract.at(use, np.where(lasting, trace.ops, trace.last_op + 1), trace.tensor_bytes)
    return np.cumsum(use)[:-1].tolist()


# --- G10 -------------------------------------------------------------------------------------


def neutral() -> dict[str, Any]:
    return {
        "schema": "g10-neutral-1",
        "workload": "tiny",
        "tensors": [[4, 2500, 1], [2, 1000, 0], [9, 7, 0], [8, 50, 1]],
        "kernels": [
            [0, "Gather", 5.5, 50.0, 70.0, 4096, [4], [2]],
            [1, "Add", 2, 3.0, 4.0, 0, [2, 4], [2, 8]],
        ],
    }


def save(path: Path, document: Any) -> Path:
    content = json.dumps(document).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", ["tiny.json", "tiny.json.gz", "gzip without the name"])
def test_g10(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / name, neutral())
    if "without" in name:
        path.write_bytes(gzip.compress(path.read_bytes()))
    trace = g10.load(path, PAGE)
    assert trace.op_names == ["Gather", "Add"]
    assert trace.op_duration_us.tolist() == [5.5, 2.0]
    assert trace.op_start_us.tolist() == [0.0, 5.5]
    assert accesses(trace) == [
        (0, 4, READ),
        (0, 2, WRITE),
        (1, 2, READWRITE),
        (1, 4, READ),
        (1, 8, WRITE),
    ]
    assert trace.tensor_ids.tolist() == [4, 2, 8]  # 9 is never touched
    assert trace.tensor_kinds == ["parameter", "activation", "parameter"]
    assert trace.tensor_persistent.tolist() == [True, False, True]
    assert trace.tensor_names == [None] * 3
    assert trace.pages(PAGE).tolist() == [3, 1, 1]
    assert trace.source == "g10-neutral-1: tiny"
    write_trace(tmp_path / "a.parquet", trace)
    assert accesses(read_trace(tmp_path / "a.parquet")) == accesses(trace)


def test_teraio(tmp_path: Path) -> None:
    document = {
        "schema": "teraio-neutral-1",
        "tensors": [[1, 10, 0], [0, 20, 1]],
        "kernels": [[0, 1.5, [0, 1]], [1, 2.5, [1]]],
    }
    trace = g10.load(save(tmp_path / "vit.json", document), PAGE)
    assert accesses(trace) == [(0, 0, READ), (0, 1, READ), (1, 1, READ)]
    assert trace.ideal_us == 4.0
    assert trace.metadata == {"workload": "vit", "reads_and_writes_apart": False}


def change(*keys: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def apply(document: dict[str, Any]) -> None:
        place: Any = document
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = to

    return apply


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (change("schema", to="g10"), "schema 'g10' is none of g10-neutral-1"),
        (change("schema", to=[]), r"schema \[\] is none of"),
        (change("tensors", to={}), "tensors is not a list"),
        (change("kernels", to=[]), "kernels is empty"),
        (lambda document: document.pop("kernels"), "kernels is missing"),
        (change("tensors", 0, to=[4, 2500]), r"tensors\[0\] = .* is not \[id, bytes, global\]"),
        (change("tensors", 1, 0, to=4), r"tensors\[1\]: id 4 is there twice"),
        (change("tensors", 1, 0, to=-4), r"tensors\[1\]: id -4"),
        (change("tensors", 1, 0, to=True), r"tensors\[1\]: id True"),
        (change("tensors", 2, 1, to=0), r"tensors\[2\]: 0 bytes"),
        (change("tensors", 2, 1, to=1.5), r"tensors\[2\]: 1.5 bytes"),
        (change("tensors", 2, 1, to=2**70), r"tensors\[2\]: \d+ bytes"),
        (change("tensors", 2, 2, to=2), r"tensors\[2\]: global = 2"),
        (change("kernels", 1, to=[1, "Add"]), r"kernels\[1\] is not a list of 8"),
        (change("kernels", 1, 1, to=3), r"kernels\[1\]: name 3"),
        (change("kernels", 1, 2, to=-1), r"kernels\[1\]: -1 µs"),
        (change("kernels", 1, 2, to=float("nan")), r"kernels\[1\]: nan µs"),
        (change("kernels", 1, 2, to=10**400), r"kernels\[1\]: 10+\.\.\.0+ µs"),
        (change("kernels", 1, 6, to=5), r"kernels\[1\]: inputs are not a list"),
        (change("kernels", 1, 6, to=[5]), r"kernels\[1\]: inputs name tensor 5"),
        (change("kernels", 1, 7, to=["2"]), r"kernels\[1\]: outputs name tensor '2'"),
    ],
)
def test_g10_refuses(tmp_path: Path, broken: Callable[[dict[str, Any]], None], reason: str) -> None:
    document = neutral()
    broken(document)
    path = save(tmp_path / "tiny.json", document)
    with pytest.raises(TraceError, match=reason) as caught:
        g10.load(path)
    assert str(path) in str(caught.value)


def test_no_json(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(TraceError, match="no such file"):
        g10.load(path)
    whole = gzip.compress(json.dumps(neutral()).encode())
    for content, reason in (
        (b"{", "not whole JSON"),
        (b"[]", "a JSON list, not an object"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 200_000, "not whole JSON"),
        (whole[:-20], "cannot be read"),
        (whole[:20] + b"\0\0\0\0" + whole[24:], "cannot be read"),
    ):
        path.write_bytes(content)
        with pytest.raises(TraceError, match=reason):
            g10.load(path)


@needs_data
def test_g10_public_traces() -> None:
    files = sorted((DATA / "g10").glob("*.json.gz"))
    assert len(files) > 10
    for file in files:
        document = json.loads(gzip.decompress(file.read_bytes()))
        trace = g10.load(file)
        assert trace.ops == document["n_kernels"]
        at = 2 if document["schema"] == "g10-neutral-1" else 1
        assert trace.ideal_us == pytest.approx(sum(kernel[at] for kernel in document["kernels"]))
        if "total_us" in document:
            assert trace.ideal_us == pytest.approx(document["total_us"])
        touched = {i for kernel in document["kernels"] for ids in kernel[at + 1 :]
                   if isinstance(ids, list) for i in ids}  # fmt: skip
        assert set(trace.tensor_ids.tolist()) == touched


# --- plain pickles ---------------------------------------------------------------------------

PLAIN = {
    "numbers": [0, 1, 255, 256, 65536, -1, -(2**31), 2**31, 2**80, -(2**80), 0.5, float("inf")],
    "texts": ["", "ü", "x" * 300, "\ud800", b"", b"\0" * 300, "y" * 70_000],
    "rest": (None, True, False, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), {}, [], [[[]]]),
    "many": list(range(3000)),
    "maps": {f"key {n}": {"n": n} for n in range(3000)},
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_pickles(tmp_path: Path, protocol: int) -> None:
    if protocol == 2:
        plain = {**PLAIN, "texts": ["", "ü", "x" * 300]}  # bytes are a call there
    else:
        plain = PLAIN
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps(plain, protocol))
    assert load_plain(path) == plain
    shared = [1]
    path.write_bytes(pickle.dumps([shared, shared], protocol))
    loaded = load_plain(path)
    assert loaded[0] is loaded[1]


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.target),))


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_pickle_runs_nothing(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps(Evil(tmp_path / "made"), protocol))
    with pytest.raises(TraceError, match=r"asks for 'posix\.mkdir'.*refused"):
        load_plain(path)
    with pytest.raises(TraceError, match=r"asks for 'posix\.mkdir'"):
        torch_snapshot.load(path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "an empty file, no pickle"),
        (b"\x80\x04", "cut off"),
        (b"\x80\x63N.", "protocol: 99"),
        (b"\x80\x04.", "not a whole pickle"),
        (b"\x80\x04NN.", "does not end with one object"),
        (b"\x80\x04(N.", "does not end with one object"),
        (b"\x80\x04h\x05.", "not a whole pickle"),
        (b"\x80\x04Na.", "not a whole pickle"),
        (b"\x80\x04N]Na.", "does not end with one object"),
        (b"\x80\x04}K\x01K\x02s.", "a dict key of type int"),
        (b"\x80\x04})K\x02s.", "a dict key of type tuple"),
        (b"S'\\h'\nQ.", "instruction b'S' at byte 0 is refused"),  # an escape that is none
        (b"\x80\x04F" + b"x" * 1000 + b"\n.", "instruction b'F' at byte 2 is refused"),
        (b"\x80\x04Q.", "instruction b'Q' at byte 2 is refused"),
        (b"\x80\x04\x82\x01.", "is refused"),
        (b"\x80\x04Nb.", "instruction b'b'"),
        (b"\x80\x04N)R.", "instruction b'R'"),
        (b"\x80\x04B\xff\xff\xff\xffx.", "cut off"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\xffx.", "maximum size"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x3fx.", "cut off"),
        (b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xffN.", "does not|not a whole|cut off"),
        (b"cos\nsystem\n(S'ls'\ntR.", "asks for 'os.system'"),
        (b"(ios\nsystem\n.", "asks for 'os.system'"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "asks for 'os.system'"),
    ],
)
def test_hostile_pickles(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "a.pickle"
    path.write_bytes(content)
    if content.startswith(b"\x80\x04\x95"):  # a frame's length is but a hint
        assert load_plain(path) is None
        return
    with pytest.raises(TraceError, match=reason):
        load_plain(path)


def test_big_claims_and_depth_cost_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.pickle"
    path.write_bytes(b"\x80\x04Nr\xff\xff\xff\xff.")  # memo entry 4,294,967,295
    assert load_plain(path) is None
    path.write_bytes(b"\x80\x04" + b"]" * 500_000 + b"a" * 499_999 + b".")
    assert isinstance(load_plain(path), list)
    with pytest.raises(TraceError, match="more than 1000 bytes"):
        load_plain(path, max_bytes=1000)
    with pytest.raises(TraceError, match="no such file"):
        load_plain(tmp_path / "none")
    with pytest.raises(TraceError, match="a folder; name the recording"):
        load_plain(tmp_path)


# --- lives of blocks -------------------------------------------------------------------------


def lives_of(*rows: tuple[int, int, int], **options: Any) -> tuple[list[Life], int]:
    table = np.array(rows)
    blocks = Blocks(table[:, 0], table[:, 1], table[:, 2])
    return lives(blocks, slice(10, 20), options.pop("period", None), **options)


def test_lives_inside_and_through() -> None:
    found, unused = lives_of((11, 15, 5), (-1, 30, 7), (-1, 9, 1), (20, 22, 1), (2, 20, 8))
    assert found == [Life(5, False, {1: WRITE, 5: READ})]
    assert unused == 15
    found, unused = lives_of((-1, 30, 7), (12, 12, 3), uses={0: {3: READ, 14: READ}})
    assert found == [Life(3, False, {2: READWRITE}), Life(7, True, {4: READ})]
    assert unused == 0


def test_lives_across_the_border() -> None:
    """The old block goes at 13; its heir comes at 16, or came at 12 already."""
    late, early = (16, 25, 5), (12, 25, 5)
    for period, born in ((10, (6, 2)), (None, (-1, -1))):
        old_of_late, old_of_early = (born[0], 13, 5), (born[1], 13, 5)
        found, _ = lives_of(old_of_late, late, period=period)
        assert found == [Life(5, True, {3: READ, 6: WRITE})]
        found, _ = lives_of(old_of_early, early, period=period, uses={1: {13: READ, 18: READ}})
        assert found == [
            Life(5, True, {3: READWRITE, 8: READ}),
            Life(5, False, {2: WRITE, 3: READ}),
        ]
    found, _ = lives_of((5, 13, 5), late, period=10)  # not the same allocation: strangers
    assert found == [Life(5, True, {3: READ}), Life(5, True, {6: WRITE})]
    found, _ = lives_of((-1, 13, 4), late)  # not the same size
    assert found == [Life(4, True, {3: READ}), Life(5, True, {6: WRITE})]


# --- memory snapshots ------------------------------------------------------------------------


class Recorder:
    """Events as the CUDA caching allocator notes them; a tenth of a millisecond each."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.live: dict[int, int] = {}
        self.used: list[int] = []
        self.next = 4096

    def note(self, action: str, address: int, size: int, line: int) -> None:
        frames = [
            {"name": "malloc", "filename": "CUDACachingAllocator.cpp", "line": 0},
            {"name": "forward", "filename": "/src/model.py", "line": line},
        ]
        time = 10**15 + 100 * len(self.events)
        event = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": time}
        self.events.append({**event, "frames": frames})
        if action != "free_requested":
            self.used.append(sum(self.live.values()))

    def alloc(self, size: int, line: int = 0) -> int:
        address, self.next = self.next, self.next + size
        self.live[address] = size
        self.note("alloc", address, size, line)
        return address

    def free(self, address: int, line: int = 0) -> None:
        size = self.live[address]
        self.note("free_requested", address, size, line)
        del self.live[address]
        self.note("free_completed", address, size, line)

    def snapshot(self, *, static: int = 0) -> dict[str, Any]:
        sizes = {1: static, **self.live} if static else self.live
        blocks = [
            {"address": address, "size": size, "requested_size": size, "state": "active_allocated"}
            for address, size in sizes.items()
        ]
        blocks.append({"address": 0, "size": 999, "requested_size": 0, "state": "inactive"})
        segments = [{"device": 0, "address": 1, "blocks": blocks}]
        segments.append({"device": 1, "address": 1, "blocks": [{**blocks[0], "size": 10**9}]})
        return {"segments": segments, "device_traces": [self.events, []]}


def train(recorder: Recorder, iterations: int, layers: int = 9) -> None:
    """Activations by layer; gradients freed at the start of the next iteration."""
    gradients: list[int] = []
    for _ in range(iterations):
        kept = [recorder.alloc(1000 + layer, line=layer) for layer in range(layers)]
        for gradient in gradients:
            recorder.free(gradient)
        gradients = []
        for layer in reversed(range(layers)):
            gradients.append(recorder.alloc(500 + layer))
            recorder.free(kept.pop())


def dump(path: Path, snapshot: Any) -> Path:
    path.write_bytes(pickle.dumps(snapshot))
    return path


def test_snapshot_of_several_iterations(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.free(recorder.alloc(12345))
    train(recorder, 5)
    used, iteration = recorder.used, 36
    trace = torch_snapshot.load(dump(tmp_path / "a", recorder.snapshot(static=4000)), PAGE)
    assert trace.metadata["iteration_found"] is True
    assert trace.metadata["static_bytes"] == 4000
    assert trace.ops == iteration
    assert trace.device == "cuda:0"
    assert (trace.op_duration_us[:18] == [100, 100, 100, 100, 100, 100, 100, 100, 200] + [200] * 9)[
        :8
    ].all()
    gradients = trace.tensor_persistent
    assert sorted(trace.tensor_bytes[gradients].tolist()) == list(range(500, 509))
    assert sorted(trace.tensor_bytes[~gradients].tolist()) == list(range(1000, 1009))
    for tensor in range(trace.tensors):
        modes = trace.access_mode[trace.access_tensor == tensor].tolist()
        assert modes == ([READ, WRITE] if gradients[tensor] else [WRITE, READ])
    steady = used[2 + 3 * iteration :][:iteration]
    assert max(bytes_in_use(trace)) >= max(steady)
    write_trace(tmp_path / "a.parquet", trace)
    assert accesses(read_trace(tmp_path / "a.parquet")) == accesses(trace)


def test_snapshot_of_one_iteration(tmp_path: Path) -> None:
    """Blocks that are replaced before they are freed: the trace uses exactly the bytes in use."""
    recorder = Recorder()
    old = [recorder.alloc(700 + n) for n in range(3)]
    recorder.events.clear()
    recorder.used.clear()
    for n, address in enumerate(old):
        temporary = recorder.alloc(50, line=7)
        recorder.alloc(700 + n)
        recorder.free(address)
        recorder.free(temporary)
    trace = torch_snapshot.load(dump(tmp_path / "a", recorder.snapshot(static=1)), PAGE)
    assert trace.metadata["iteration_found"] is False
    assert trace.ops == trace.metadata["recorded_events"] == 12
    assert trace.op_names[0] == "alloc forward (model.py:7)"
    during = np.array(recorder.used)  # a block counts in its last op, too
    frees = np.array([name.startswith("free") for name in trace.op_names])
    during[frees] += np.array([700, 50, 701, 50, 702, 50])
    assert bytes_in_use(trace) == during.tolist()
    assert trace.metadata["static_bytes"] == 1


def test_snapshot_layers_are_no_iteration(tmp_path: Path) -> None:
    recorder = Recorder()
    kept = []
    for _ in range(30):
        for size in (100, 200, 300, 400, 500, 600, 700, 800):
            recorder.free(recorder.alloc(size))
        kept.append(recorder.alloc(900))
    trace = torch_snapshot.load(dump(tmp_path / "a", recorder.snapshot()), PAGE)
    assert trace.metadata["iteration_found"] is False
    assert trace.ops == 30 * 17
    assert trace.tensor_persistent.sum() == 30


def broken_event(**values: Any) -> dict[str, Any]:
    event = {"action": "alloc", "addr": 1, "size": 5, "time_us": 3}
    return {"device_traces": [[event, {**event, **values}]], "segments": []}


@pytest.mark.parametrize(
    ("snapshot", "reason"),
    [
        ([], "no list 'device_traces'"),
        ({"device_traces": [3]}, "no list 'device_traces'"),
        ({"device_traces": [[], []]}, "no events; call"),
        ({"device_traces": [["x"]]}, r"device_traces\[0\]\[0\]: not an event"),
        ({"device_traces": [[{"action": "oom"}]]}, "no allocation and no free among 1 events"),
        (broken_event(time_us=None), r"\[1\]: time_us = None .* PyTorch 2.2"),
        (broken_event(addr="x"), r"\[1\]: addr = 'x'"),
        (broken_event(size=-5), r"\[1\]: size = -5"),
        (broken_event(size=2**64), r"\[1\]: size = \d+"),
    ],
)
def test_snapshot_refuses(tmp_path: Path, snapshot: Any, reason: str) -> None:
    with pytest.raises(TraceError, match=reason):
        torch_snapshot.load(dump(tmp_path / "a", snapshot))


def test_snapshot_with_odd_segments(tmp_path: Path) -> None:
    snapshot = broken_event(addr=2)
    odd: list[Any] = [3, None, {"blocks": 3}, {"blocks": [4, {"state": "active"}]}]
    trace = torch_snapshot.load(dump(tmp_path / "a", {**snapshot, "segments": odd}))
    assert trace.tensor_bytes.tolist() == [5, 5]
    older = {"address": 50, "blocks": [{"size": 8, "state": "inactive"},
                                       {"size": 9, "state": "active_pending_free"}]}  # fmt: skip
    trace = torch_snapshot.load(dump(tmp_path / "a", {**snapshot, "segments": [older]}))
    assert trace.metadata["static_bytes"] == 9


@needs_data
@pytest.mark.parametrize("name", ["medium_128_training", "medium_512_training"])
def test_public_snapshots(name: str) -> None:
    path = DATA / "torch-snapshots" / f"{name}.pickle"
    trace = torch_snapshot.load(path)
    kept = ("alloc", "free_completed")
    events = [e for e in load_plain(path)["device_traces"][0] if e["action"] in kept]
    assert trace.ops == len(events)
    assert trace.ideal_us == events[-1]["time_us"] - events[0]["time_us"]
    sizes = {e["size"] for e in events}
    assert set(trace.tensor_bytes.tolist()) == sizes
    # From the end, where the snapshot lists all blocks, back to the start of the recording.
    blocks = [b for s in load_plain(path)["segments"] for b in s["blocks"]]
    at_end = sum(b["requested_size"] for b in blocks if b["state"].startswith("active"))
    change = np.array([e["size"] if e["action"] == "alloc" else -e["size"] for e in events])
    in_use = at_end - change.sum() + np.cumsum(change)
    in_use[change < 0] -= change[change < 0]  # a block counts in its last op, too
    traced = np.array(bytes_in_use(trace)) + trace.metadata["static_bytes"]
    assert (traced >= in_use).all()
    assert traced.max() < 1.3 * in_use.max()


# --- profiles --------------------------------------------------------------------------------


def call(name: str, ts: float, dur: float, *shapes: list[int], kind: str = "float", **more: Any):
    arguments = {"Input Dims": list(shapes), "Input type": [kind] * len(shapes), **more}
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur,
            "args": arguments}  # fmt: skip


def memory(ts: float, address: int, nbytes: int, device: int = 0, total: int = 0) -> dict[str, Any]:
    arguments = {"Addr": address, "Bytes": nbytes, "Device Type": device, "Device Id": 0}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1,
            "ts": ts, "args": {**arguments, "Total Allocated": total}}  # fmt: skip


def profile() -> list[dict[str, Any]]:
    """randn → a; linear(a, weight) → b with a temporary; relu_(b); both freed."""
    return [
        call("aten::randn", 100.0, 10.0),
        memory(105.0, 1, 400, total=900),
        call("aten::linear", 120.0, 30.0, [10, 10], [5, 10]),
        call("aten::addmm", 125.0, 20.0, [10, 10], [10, 5]),
        memory(126.0, 2, 200),
        memory(127.0, 3, 64),
        memory(140.0, 3, -64),
        call("aten::relu_", 145.0, 10.0, [10, 5]),  # begins before linear has ended: another thread
        memory(160.0, 1, -400),
        memory(161.0, 2, -200),
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ]


def load_profile(path: Path, events: list[Any]) -> Trace:
    return torch_profiler.load(save(path, {"schemaVersion": 1, "traceEvents": events}), PAGE)


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_profile(tmp_path: Path, name: str) -> None:
    events = profile()
    events[7]["tid"] = 2
    trace = load_profile(tmp_path / name, events)
    assert trace.op_names == ["aten::randn", "aten::linear", "aten::relu_"]
    assert trace.op_start_us.tolist() == [0.0, 20.0, 45.0]
    assert trace.op_duration_us.tolist() == [10.0, 25.0, 10.0]
    assert trace.tensor_bytes.tolist() == [400, 64, 200]
    assert accesses(trace) == [
        (0, 0, WRITE),
        (1, 0, READ),
        (1, 1, READWRITE),
        (1, 2, WRITE),
        (2, 0, READ),  # freed after it
        (2, 2, READWRITE),
    ]
    assert not trace.tensor_persistent.any()
    assert trace.device == "cpu"
    assert trace.metadata["static_bytes"] == 500
    assert (trace.metadata["matched_inputs"], trace.metadata["unmatched_inputs"]) == (2, 1)
    write_trace(tmp_path / "a.parquet", trace)


def test_profile_of_a_gpu(tmp_path: Path) -> None:
    """Sizes are rounded, kernels tell the times, and blocks in host memory do not count."""
    events = [
        call("aten::empty", 0.0, 1.0, **{"External id": 1}),
        memory(0.5, 7, 512, device=1),
        memory(0.6, 7, 400),
        call("aten::mm", 2.0, 1.0, [10, 10], [10, 10], **{"External id": 2}),
        call("aten::mm", 2.1, 0.5, [10, 10], [10, 10], **{"External id": 3}),
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 50.0, "dur": 30.0,
         "args": {"External id": 3}},
        {"ph": "X", "cat": "kernel", "name": "add", "ts": 80.0, "dur": 4.0,
         "args": {"External id": 2}},
    ]  # fmt: skip
    trace = load_profile(tmp_path / "a.json", events)
    assert trace.device == "cuda:0"
    assert trace.op_duration_us.tolist() == [0.0, 34.0]
    assert trace.op_start_us.tolist() == [0.0, 0.0]
    assert accesses(trace) == [(0, 0, WRITE), (1, 0, READ)]
    assert trace.tensor_bytes.tolist() == [512]
    assert trace.tensor_persistent.tolist() == [True]  # never freed


def step(number: int, start: float, *, annotated: bool) -> list[dict[str, Any]]:
    """Twenty ops, each on the output of the one before; the last output stays for the next step."""
    events = []
    for n in range(20):
        at, block = start + 10.0 * n, 100 * number + n
        events += [call(f"op{n}", at, 8.0, [n + 1, 25]), memory(at + 1, block, 100 * (n + 2))]
        free, size = (block - 1, 100 * (n + 1)) if n else (block - 81, 2100)
        if n or number:
            events.append(memory(at + 5, free, -size))
    if annotated:
        name = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number}"}
        events.append({**name, "pid": 1, "tid": 1, "ts": start - 1, "dur": 200.0})
    return events


@pytest.mark.parametrize("annotated", [True, False])
def test_profile_of_several_steps(tmp_path: Path, annotated: bool) -> None:
    events = [e for n in range(4) for e in step(n, 1000.0 * n + 5, annotated=annotated)]
    events += step(4, 4005.0, annotated=annotated)[:12]
    trace = load_profile(tmp_path / "a.json", events)
    assert trace.metadata["iteration_found"] is True
    assert trace.metadata["recorded_ops"] == 84 if annotated else 85
    assert trace.ops == 20
    if annotated:
        assert trace.metadata["first_op"] == 60
        assert trace.op_names == [f"op{n}" for n in range(20)]
    assert trace.tensor_persistent.sum() == 1
    assert trace.metadata["static_bytes"] == 0


def test_input_bytes() -> None:
    arguments = {
        "Input Dims": [[2, 3], [], [[4], [5, 0], [6]], [7], "x"],
        "Input type": ["c10::Half", "double", "TensorList", "Scalar", "float"],
    }
    assert input_bytes("aten::add", arguments) == ((12, 8, 16, 24), 0)
    assert input_bytes("aten::add_", arguments) == ((12, 8, 16, 24), 1)
    assert input_bytes("aten::__and__", arguments)[1] == 0
    lists = {"Input Dims": [[[4], [6]], [[4], [6]]], "Input type": ["TensorList", "TensorList"]}
    assert input_bytes("aten::_foreach_add_", lists) == ((16, 24, 16, 24), 2)
    assert input_bytes("aten::add", {}) == ((), 0)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (lambda events: [], "record_shapes=True"),
        (lambda events: events[1:2], "record_shapes=True"),
        (lambda events: [events[0]], "profile_memory=True"),
        (lambda events: [*events, 3], r"traceEvents\[11\] is not an object"),
        (lambda events: [{**events[0], "ts": "x"}], r"traceEvents\[0\]: ts = 'x'"),
        (lambda events: [{**events[0], "dur": -1}], r"traceEvents\[0\]: dur = -1"),
        (lambda events: [events[0], {**events[1], "args": {"Addr": 1}}], r"traceEvents\[1\]: a .m"),
        (lambda events: [events[0], memory(1.0, 1, 2**70)], r"traceEvents\[1\]: a .memory"),
    ],
)
def test_profile_refuses(tmp_path: Path, broken: Callable[[Any], Any], reason: str) -> None:
    with pytest.raises(TraceError, match=reason):
        load_profile(tmp_path / "a.json", broken(profile()))


def test_profile_without_events(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no list 'traceEvents'"):
        torch_profiler.load(save(tmp_path / "a.json", {"traceEvents": 3}))


def test_a_real_profile(tmp_path: Path) -> None:
    """A training step of a small network: what is known of its memory is in the trace."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step() -> None:
        loss = model(torch.randn(32, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    train_step()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, record_shapes=True
    ) as recording:
        for _ in range(3):
            train_step()
    path = tmp_path / "profile.json.gz"
    recording.export_chrome_trace(str(path))
    trace = torch_profiler.load(path, 4096)
    assert trace.metadata["iteration_found"] is True
    assert trace.ops * 3 == trace.metadata["recorded_ops"]
    assert trace.op_names.count("aten::linear") == 2
    assert (trace.op_duration_us >= 0).all()
    gelu = trace.op_names.index("aten::gelu")
    hidden = 32 * 256 * 4
    inside = trace.access_op == gelu
    used = dict(
        zip(trace.access_mode[inside].tolist(), trace.access_tensor[inside].tolist(), strict=True)
    )
    assert set(used) == {READ, WRITE}
    assert trace.tensor_bytes[list(used.values())].tolist() == [hidden, hidden]
    linear = trace.op_names.index("aten::linear")
    assert trace.first_op[used[READ]] == linear  # the first layer's output
    backward = [n for n, name in enumerate(trace.op_names) if name.endswith("GeluBackward0")]
    assert trace.last_op[used[READ]] >= backward[0]
    gradients = {64 * 256 * 4, 256 * 4, 256 * 10 * 4, 10 * 4}
    assert gradients <= set(trace.tensor_bytes.tolist())
    write_trace(tmp_path / "a.parquet", trace)
    assert accesses(read_trace(tmp_path / "a.parquet")) == accesses(trace)
