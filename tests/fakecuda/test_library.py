"""The fake CUDA behaves as CUDA does where programs depend on it."""

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch

Counted = Callable[[Callable[[], object]], dict[str, int]]
MIB = 1 << 20

pytestmark = pytest.mark.gpu(values=False)


def test_two_devices_with_memory_of_their_own() -> None:
    assert torch.cuda.device_count() == 2
    torch.cuda.empty_cache()
    before = [torch.cuda.mem_get_info(index)[0] for index in range(2)]
    tensor = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda:1")
    taken = [was - torch.cuda.mem_get_info(index)[0] for index, was in enumerate(before)]
    assert tensor.device.index == 1
    assert taken == [0, 64 * MIB]
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(80 << 30, dtype=torch.uint8, device="cuda:1")


def test_copies_are_real_and_counted(counted: Counted) -> None:
    values = torch.arange(1 << 18, dtype=torch.int32)
    locked = values.pin_memory()
    devices: list[torch.Tensor] = []
    pageable = counted(lambda: devices.append(values.cuda()))
    assert (pageable["copies"], pageable["pageable_copies"]) == (1, 1)
    assert pageable["copied_bytes"] == MIB
    assert pageable["synchronizations"] == 1
    fast = counted(lambda: devices.append(locked.to("cuda", non_blocking=True)))
    assert (fast["copies"], fast["pageable_copies"], fast["synchronizations"]) == (1, 0, 0)
    assert all(torch.equal(tensor.cpu(), values) for tensor in devices)


def test_registered_memory_is_page_locked(counted: Counted) -> None:
    values, target = torch.ones(1 << 12), torch.empty(1 << 12, device="cuda")
    cudart = torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(values.data_ptr(), values.nbytes, 0)) == 0
    assert int(cudart.cudaHostRegister(values.data_ptr() + 64, 64, 0)) != 0
    with pytest.raises(RuntimeError, match="already mapped"):  # the error waits for who asks next
        torch.zeros(1, device="cuda")
    torch.zeros(1, device="cuda")
    copied = counted(lambda: target.copy_(values, non_blocking=True))
    assert (copied["copies"], copied["pageable_copies"]) == (1, 0)
    assert int(cudart.cudaHostUnregister(values.data_ptr())) == 0
    copied = counted(lambda: target.copy_(values, non_blocking=True))
    assert copied["pageable_copies"] == 1


def test_kernels_are_counted_and_do_nothing(counted: Counted) -> None:
    tensor = torch.zeros(64, device="cuda")
    tensor.copy_(torch.ones(64))
    assert counted(lambda: tensor.add_(1))["launches"] == 1
    assert counted(lambda: tensor.view(8, 8) @ tensor.view(8, 8))["launches"] == 1
    assert tensor.cpu().eq(1).all()


def test_streams_and_events_are_counted(counted: Counted) -> None:
    stream, event = torch.cuda.Stream(), torch.cuda.Event()

    def wait() -> None:
        event.record()
        stream.wait_event(event)
        event.synchronize()
        torch.cuda.synchronize()

    found = counted(wait)
    assert (found["event_records"], found["event_waits"], found["synchronizations"]) == (1, 1, 2)


UNMAPPED = """
import torch
from cuda.bindings import driver
torch.empty(1, device="cuda")
code, base = driver.cuMemAddressReserve(4 << 20, 0, 0, 0)
storage = torch._C._construct_storage_from_data_pointer(int(base), torch.device("cuda:0"), 4 << 20)
arena = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage, 0, (4 << 20,), (1,))
print("copying", flush=True)
arena[:512].copy_(torch.zeros(512, dtype=torch.uint8))
print("copied")
"""


def test_addresses_without_memory_end_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", UNMAPPED], capture_output=True, text=True)
    assert ended.stdout == "copying\n", ended.stderr
    assert "nothing is mapped at" in ended.stderr


def test_a_kernel_on_another_devices_stream_is_refused() -> None:
    tensor = torch.zeros(8, device="cuda:0")
    other = torch.cuda.Stream("cuda:1")
    stream = torch.cuda.ExternalStream(other.cuda_stream, "cuda:0")
    with torch.cuda.stream(stream), pytest.raises(RuntimeError, match="invalid resource handle"):
        tensor.add_(1)


# -- capture --------------------------------------------------------------------------------------
def captured(work: Callable[[], object], mode: str = "global") -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        work()
    return graph


def test_a_graph_replays_what_was_captured(counted: Counted) -> None:
    source = torch.zeros(16, pin_memory=True)
    target = torch.empty(16, device="cuda")
    graph = captured(lambda: target.copy_(source, non_blocking=True))
    source.fill_(3)
    replayed = counted(graph.replay)
    assert (replayed["graph_launches"], replayed["launches"], replayed["copies"]) == (1, 0, 0)
    assert target.cpu().eq(3).all()


FORBIDDEN = {
    "the host waits for the stream": (
        lambda: torch.cuda.current_stream().synchronize(),
        "not permitted when stream is capturing",
    ),
    "the host waits for the device": (
        torch.cuda.synchronize,
        "not permitted when stream is capturing",
    ),
    "a value is read": (
        lambda: torch.ones(1, device="cuda").item(),
        "not permitted when stream is capturing",
    ),
    "a copy that the host waits for": (
        lambda: LOCKED[0].cuda(),
        "not permitted when stream is capturing",
    ),
    "a wait for what is not captured": (
        lambda: torch.cuda.current_stream().wait_event(EARLIER[0]),
        "dependency created on uncaptured work",
    ),
    "memory is allocated behind PyTorch's back": (
        lambda: torch.cuda.check_error(
            ctypes.CDLL(None).cudaMalloc(ctypes.byref(ctypes.c_void_p()), 1)
        ),
        "not permitted when stream is capturing",
    ),
}
EARLIER: list[torch.cuda.Event] = []
LOCKED: list[torch.Tensor] = []


@pytest.mark.parametrize("what", FORBIDDEN)
def test_what_is_forbidden_in_a_capture_is_refused(what: str) -> None:
    EARLIER[:] = [torch.cuda.Event()]
    EARLIER[0].record()
    LOCKED[:] = [torch.ones(8).pin_memory()]
    work, message = FORBIDDEN[what]
    errors: list[str] = []

    def attempt() -> None:
        try:
            work()
        except (RuntimeError, torch.AcceleratorError) as error:
            errors.append(str(error))

    with pytest.raises(RuntimeError, match="previous error during capture"):
        captured(attempt)
    assert message in errors[0]
    torch.cuda.synchronize()  # after it the device is as before
    assert torch.ones(1, device="cuda").cpu().numel() == 1


def test_streams_that_a_capture_took_in_must_come_back() -> None:
    side = torch.cuda.Stream()
    tensor = torch.zeros(8, device="cuda")

    def fork(join: bool) -> None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            tensor.add_(1)
        if join:
            main.wait_stream(side)

    captured(lambda: fork(True)).replay()
    with pytest.raises(RuntimeError, match="unjoined work"):
        captured(lambda: fork(False))


def test_other_threads_may_not_query_events_during_a_global_capture() -> None:
    event = torch.cuda.Event()
    event.record()
    errors: list[str] = []

    def ask() -> None:
        try:
            event.query()
        except RuntimeError as error:
            errors.append(str(error))

    def in_a_thread() -> None:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()

    captured(in_a_thread, "thread_local")
    assert not errors
    with pytest.raises(RuntimeError, match="previous error during capture"):
        captured(in_a_thread, "global")
    assert "not permitted when stream is capturing" in errors[0]
