#!/usr/bin/env bash
# The CUDA build of PyTorch on a machine that has no GPU: under it a CUDA library of our own
# (tests/fakecuda), which has memory, copies, streams and events, and whose kernels do nothing. It
# shows whether the code for GPUs runs, and what the CPU does for it; numbers mean nothing.
#
#   scripts/fake_gpu.sh              the library's tests, scripts/gpu_check.py with all GPU tests,
#                                    scripts/bench_host_path.py
#   scripts/fake_gpu.sh COMMAND...   the command, with that PyTorch and that library
#
# TORCH=2.11.0 TRITON=3.6.0 PYTHON=python3.12 before it take other versions than those of CI.
# The first start installs some 5 GB into a folder below $TENSORPAGER_FAKE_GPU, by default
# ~/.cache/tensorpager/fake-gpu; an install that was interrupted goes on. Exits 75, with the reason
# in the last line of stderr, if the environment cannot be made.
set -uo pipefail
ROOT=$(cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT" || exit 1
NEEDED_MIB=9000 # what the installed packages take, and what pip keeps while it installs
OTHERS=(numpy highspy pyarrow xxhash sortedcontainers rich click pytest pytest-timeout pytest-xdist
  hypothesis expecttest psutil transformers safetensors accelerate peft)

cannot() {
  printf 'fake_gpu: %s\n' "$*" >&2
  exit 75
}

pinned() { sed -n "s/^$1==//p" constraints.txt; }

python=${PYTHON:-python3}
"$python" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
  || cannot "needs Python ≥ 3.11 with venv; set PYTHON to its path"
version=$("$python" -c 'import platform; print(platform.python_version())')
for tool in g++ gcc nm flock sha256sum; do
  command -v "$tool" >/dev/null || cannot "needs $tool; install it (g++, binutils, util-linux)"
done
torch=${TORCH:-$(pinned torch)} triton=${TRITON:-$(pinned triton)}
key=torch-$torch-triton-$triton-python-$version
wanted=$({ cat constraints.txt; echo "${OTHERS[@]}"; } | sha256sum)
home=${TENSORPAGER_FAKE_GPU:-${XDG_CACHE_HOME:-$HOME/.cache}/tensorpager/fake-gpu}/$key
mkdir -p "$home" || cannot "cannot make $home; set TENSORPAGER_FAKE_GPU to another folder"

install() {
  local pip=("$home/venv/bin/python" -m pip install -q --disable-pip-version-check) constraints=$home/constraints.txt
  local free runtime
  free=$(df -Pm "$home" | awk 'NR == 2 {print $4}')
  [ "$free" -ge "$NEEDED_MIB" ] || cannot "$home has $free MiB free; the CUDA build of PyTorch needs $NEEDED_MIB"
  printf 'fake_gpu: installing the CUDA build of PyTorch into %s (some 5 GB)\n' "$home" >&2
  [ -x "$home/venv/bin/python" ] || "$python" -m venv "$home/venv" || cannot 'venv failed'
  # cuFile comes with this PyTorch in a version of its own.
  grep -vE '^(torch|triton|nvidia-cufile)==|^setuptools' constraints.txt >"$constraints"
  # Three equals signs: not the build for CPUs, whose version has more behind it.
  "${pip[@]}" -c "$constraints" "torch===$torch" "triton==$triton" 'cuda-bindings>=13,<14' >&2 \
    && "${pip[@]}" -c "$constraints" "${OTHERS[@]}" >&2 \
    || cannot 'pip could not install the CUDA build of PyTorch; the lines above say why'
  runtime=$("$home/venv/bin/python" -c '
import importlib.metadata
print(".".join(importlib.metadata.version("nvidia-cuda-runtime").split(".")[:2]))')
  "${pip[@]}" "nvidia-cuda-crt==$runtime.*" >&2 || cannot 'pip could not install the headers of CUDA'
  printf '%s\n' "$wanted" >"$home/installed"
}

exec {lock}<"$home"
flock "$lock"
[ "$(cat "$home/installed" 2>/dev/null)" = "$wanted" ] || install
library=$home/library-$(cat tests/fakecuda/{*.h,*.cpp,build.py} | sha256sum | cut -c1-16)
if [ ! -f "$library/libcuda.so" ]; then
  "$home/venv/bin/python" tests/fakecuda/build.py "$library" >&2 || cannot 'the library does not compile'
fi
exec {lock}<&-

export PATH="$home/venv/bin:$PATH" VIRTUAL_ENV=$home/venv PYTHONPATH=$ROOT
export LD_LIBRARY_PATH=$library LD_PRELOAD=$library/libcudart.so.13 TRITON_LIBCUDA_PATH=$library
export TRITON_CACHE_DIR=$home/triton OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
unset PYTHONHOME
unset CI BUILD_NUMBER # pytest would explain each difference whole: minutes for a wrong page
[ $# -eq 0 ] || exec "$@"

status=0
results=$(mktemp -d "${TMPDIR:-/tmp}/fake_gpu.XXXXXX")
python -m pytest -q -p no:cacheprovider --timeout=3600 tests/fakecuda || status=1
# Only zeros in device memory: what compares two trainings goes on to its end. The minutes are of CPU
# time, and no machine is so fast that compiling all kernels fits in the nine that a GPU gets.
FAKECUDA_ZEROS=1 python scripts/gpu_check.py --minutes 60 --json "$results/gpu_check.json" || status=1
python scripts/bench_host_path.py --json "$results/host_path.json" || status=1
printf 'fake_gpu: %s; results in %s\n' "$([ $status -eq 0 ] && echo ok || echo FAILED)" "$results"
exit $status
