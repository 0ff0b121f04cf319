# Sourced by the other scripts: makes the project's own Python environment, and uses it.
#
#   . scripts/env.sh
#
# Sets ROOT, goes there, and puts .venv first in PATH. The first start installs (a few minutes);
# later ones find the stamp, written last, and do nothing. The stamp holds a hash of everything that
# decides what is installed, so an interrupted install, a moved folder or a changed pin is installed
# again. Of several starts at once, one installs and the others wait for it.

ROOT=$(cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
STAMP=$VENV/.installed

_env_say() { printf 'env: %s\n' "$*" >&2; }

# First Python ≥ 3.11 that runs and can make environments; $PYTHON goes before all others.
_env_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return 0
    fi
  done
  _env_say 'no Python ≥ 3.11 with venv found; install one, or set PYTHON to its path'
  return 1
}

# What the stamp must say. Fails where the environment's Python does not run.
_env_fingerprint() {
  local version
  version=$("$VENV/bin/python" -c 'import sys; print(sys.version)' 2>/dev/null) || return 1
  { printf '%s\n%s\n' "$ROOT" "$version"; cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt"; } \
    | sha256sum | cut -d ' ' -f 1
}

_env_is_current() {
  local fingerprint
  [ -f "$STAMP" ] && fingerprint=$(_env_fingerprint) && [ "$(cat "$STAMP")" = "$fingerprint" ]
}

_env_install() {
  local python torch constraints=$ROOT/constraints.txt
  if ! "$VENV/bin/python" -c '' 2>/dev/null; then
    python=$(_env_python) || return 1
    _env_say "making $VENV with $("$python" --version)"
    "$python" -m venv --clear "$VENV" || return 1
  elif ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    "$VENV/bin/python" -m ensurepip --upgrade >/dev/null || return 1
  fi
  rm -f "$STAMP"
  torch=$(grep -E '^torch==' "$constraints") || return 1
  # By name and alone: pip then takes this version from wherever it is configured to look.
  _env_say "installing $torch (the first time this takes a few minutes)"
  (cd "$ROOT" && "$VENV/bin/python" -m pip install -qq -c constraints.txt "$torch") || return 1
  _env_say 'installing tensorpager and its test tools'
  (cd "$ROOT" && "$VENV/bin/python" -m pip install -qq -c constraints.txt -e '.[test]') || return 1
  # Without what else they ask for, which is over a gigabyte of CUDA that only a GPU needs.
  (cd "$ROOT" && "$VENV/bin/python" -m pip install -qq --no-deps -c constraints.txt kvikio-cu13 \
    libkvikio-cu13 nvidia-cufile cuda-pathfinder rapids-logger) \
    || _env_say 'KvikIO cannot be installed here; its tests are skipped'
  _env_fingerprint >"$STAMP.new" && mv "$STAMP.new" "$STAMP"
}

_env_main() {
  _env_is_current && return 0
  mkdir -p "$VENV" || return 1
  local lock status=0
  exec {lock}<"$VENV" # the folder itself: survives its being cleared
  if command -v flock >/dev/null && ! flock -n "$lock"; then
    _env_say 'another start is installing; waiting for it'
    flock "$lock"
  fi
  _env_is_current || _env_install || status=1
  exec {lock}<&-
  [ "$status" -eq 0 ] || _env_say 'the install did not finish; start again to go on'
  return "$status"
}

_env_main || exit 1
export PATH="$VENV/bin:$PATH" VIRTUAL_ENV=$VENV
unset PYTHONHOME PYTHONPATH
# Threads that wait for each other sleep instead of spinning: on a machine that does other work too
# a step is otherwise many times slower.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
cd "$ROOT" || exit 1
