"""The summary of a profile's trace: a small one of a GPU, whose sums are known, and what is no trace."""

import json

import pytest

from megatron_rl.observability.profile.summary import group_of, summarize
from megatron_rl.observability.profile.table import table_of

MAIN, AUTOGRAD, PACKING, STREAM = 1, 2, 3, 7


def event(category: str, name: str, thread: int, start: float, seconds: float) -> dict:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": start * 1e6, "dur": seconds * 1e6}


def allocated(moment: float, total: int) -> dict:
    return {"ph": "i", "name": "[memory]", "ts": moment * 1e6, "args": {"Total Allocated": total, "Device Type": 0}}


# Ten seconds: two forwards and a backward within seven seconds of passes, beside them the packing of a micro-batch.
TRACE = [
    event("user_annotation", "profiled", MAIN, 0, 10),
    event("user_annotation", "passes that train", MAIN, 1, 7),
    event("user_annotation", "forward mb=0 stage=0 chunk=0", MAIN, 1, 2),
    event("user_annotation", "forward mb=1 stage=0 chunk=0", MAIN, 3, 1),
    event("user_annotation", "backward mb=0 stage=0 chunk=0", MAIN, 5, 2),
    event("user_annotation", "pack mb=1", PACKING, 1, 1),
    event("cpu_op", "aten::linear", MAIN, 1, 2),
    event("cpu_op", "aten::mm", MAIN, 1.5, 1),
    event("cpu_op", "aten::mm", AUTOGRAD, 5, 1),
    event("cpu_op", "aten::_local_scalar_dense", MAIN, 3.5, 0.25),
    event("cpu_op", "aten::_local_scalar_dense", MAIN, 8.5, 0.25),
    event("cuda_runtime", "cudaStreamSynchronize", AUTOGRAD, 6, 0.5),
    event("cuda_runtime", "cudaStreamSynchronize", PACKING, 1.5, 0.25),
    event("cuda_runtime", "cudaLaunchKernel", MAIN, 2, 0.25),
    event("kernel", "gemm", STREAM, 2, 3),
    event("kernel", "ncclDevKernel_AllReduce", STREAM + 1, 4, 2),
    event("gpu_memcpy", "Memcpy HtoD", STREAM, 6.5, 0.5),
    event("user_annotation", "nccl:all_reduce", MAIN, 4.5, 0.25),
    allocated(0.5, 10),
    allocated(2, 500),
    allocated(3.5, 300),
    {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "rank 0"}},
]


def test_sums_of_a_small_trace():
    found = summarize(TRACE, "profiled", MAIN)
    assert (found.window_s, found.num_events) == (pytest.approx(10), len(TRACE))
    assert found.main_idle_share == pytest.approx(1 - (2 + 0.25 + 0.25) / 10)
    assert found.device_idle_share == pytest.approx(1 - (6 - 2 + 0.5) / 10)
    assert found.collectives_s == pytest.approx(2)  # the range lies within the kernel's two seconds
    assert (found.passes_s, found.in_passes_s) == (pytest.approx(7), pytest.approx(2 + 1 + 2))
    forward, passes = found.ranges["forward"], found.ranges["passes that train"]
    assert (forward.count, forward.own_s, forward.peak_bytes) == (2, pytest.approx(3), 500)
    assert (passes.total_s, passes.own_s) == (pytest.approx(7), pytest.approx(2))
    assert found.ranges["backward"].peak_bytes == 300 and "nccl:all_reduce" not in found.ranges
    assert set(found.collectives) == {"nccl:all_reduce", "ncclDevKernel_AllReduce"}
    linear, mm = found.operations["aten::linear"], found.operations["aten::mm"]
    assert (linear.own_s, mm.count, mm.own_s) == (pytest.approx(1), 2, pytest.approx(2))
    assert list(found.kernels) == ["gemm", "ncclDevKernel_AllReduce", "Memcpy HtoD"]


def test_waits_are_counted_per_micro_batch():
    """Those of autograd's own thread count, those of the packing thread and outside of passes do not."""
    found = summarize(TRACE, "profiled", MAIN)
    assert found.waits == {"forward": {"aten::_local_scalar_dense": 0.5}, "backward": {"cudaStreamSynchronize": 1.0}}


def test_the_table_names_what_the_summary_holds():
    found = summarize(TRACE, "profiled", MAIN)
    text = table_of(found)
    for words in ("device idle 55.0 %", "no operation of torch 75.0 %", "schedule 7.000 s", "and backward 28.6 %",
                  "forward: aten::_local_scalar_dense 0.50", "backward: cudaStreamSynchronize 1.00", "gemm", "MiB"):
        assert words in text, text
    written = json.loads(found.to_json(3, 5, 6))
    assert (written["rank"], written["first_step"], written["last_step"]) == (3, 5, 6)
    assert written["ranges"]["forward"]["count"] == 2


def test_a_trace_without_the_recording_is_refused():
    with pytest.raises(ValueError, match="no range 'profiled'"):
        summarize(TRACE[1:], "profiled", MAIN)
    assert table_of(summarize(TRACE[:1], "profiled", MAIN)).startswith("recorded 10.000 s, 1 events")


def test_a_name_loses_its_number():
    names = {"forward mb=12 stage=3 chunk=1 filler": "forward", "update step=40": "update",
             "critic loss mb=0": "critic loss"}
    assert {name: group_of(name) for name in names} == names
