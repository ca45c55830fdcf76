#!/usr/bin/env bash
# Everything from a fresh Debian or Ubuntu to a trained model: bash cmake/quickstart.sh help
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bash cmake/quickstart.sh build | train [options of qwen_pretrain] | test [options of ctest] |
                                bench [options of benchmarks/compare.py] | help

  build   set up (compiler and libraries by apt-get, libtorch by pip), configure and compile everything
  train   the same for what it needs, then pretrain a small Qwen2 on two ranks; Ctrl-C saves and stops, the same
          command again resumes
  test    the same, then all tests; the exit status is theirs
  bench   the same, then libddp and PyTorch's DDP side by side, and a report (a quarter of an hour)

libtorch: Torch_DIR, else CMAKE_PREFIX_PATH, else python3's torch, where they have one >= 2.11; else one is fetched.
  LIBDDP_CACHE           where it is kept                                              (~/.cache/libddp)
  LIBDDP_TORCH_VERSION   which version is fetched                                      (2.15.0)
  LIBDDP_PIP_ARGS        more arguments for pip, such as the index of CPU-only builds
build:
  LIBDDP_BUILD_DIR       the build folder                                              (build, in the project)
  LIBDDP_CMAKE_ARGS      more arguments for cmake --preset release
  LIBDDP_JOBS            compile jobs at once                                          (as cores and memory allow)
train:
  LIBDDP_TRAIN_RANKS     processes                                                     (2)
  LIBDDP_TRAIN_STEPS     stop after so many optimizer steps                            (what the preset says)
  LIBDDP_TRAIN_DATA      a text file or a folder                                       (libtorch's C++ headers)
  LIBDDP_TRAIN_DIR       where checkpoints and plots go                                (runs/tiny, in the project)
TEXT
}

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${LIBDDP_CACHE:-$HOME/.cache/libddp}
torch_version=${LIBDDP_TORCH_VERSION:-2.15.0}
build=${LIBDDP_BUILD_DIR:-$repo/build}
case $build in /*) ;; *) build=$PWD/$build ;; esac
logs=$build/quickstart
oldest_torch=2.11
oldest_cmake=3.25

say() { printf 'libddp: %s\n' "$*"; }
die() { printf 'libddp: %s\n' "$*" >&2; exit 1; }

# step NAME COMMAND...: one line with the time it took; the output goes to a log. The command says what it did in $note.
step() {
  local name=$1 begin=${EPOCHREALTIME/./} log=$logs/$1.log status=0
  shift
  note=""
  mkdir -p "$logs"
  : >"$log"
  if [[ -t 1 ]]; then printf 'libddp: %-10s ...' "$name"; fi
  # Not in a subshell, so that a step can set variables; `set -e` is off inside, so each step ends in && chains.
  "$@" >>"$log" 2>&1 || status=$?
  if [[ -t 1 ]]; then printf '\r\033[K'; fi
  local ms=$(((${EPOCHREALTIME/./} - begin) / 1000))
  if ((status != 0)); then
    printf 'libddp: %-10s FAILED after %d.%d s%s\n' "$name" $((ms / 1000)) $((ms % 1000 / 100)) "${note:+: $note}" >&2
    if [[ -s $log ]]; then
      tail -n 15 "$log" | sed 's/^/    /' >&2
      printf 'libddp: the whole output is in %s\n' "$log" >&2
    fi
    exit 1
  fi
  printf 'libddp: %-10s %5d.%d s  %s\n' "$name" $((ms / 1000)) $((ms % 1000 / 100)) "$note"
}

# at_least VERSION OLDEST
at_least() { [[ $(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1) == "$2" ]]; }

# ---- 1. tools and libraries --------------------------------------------------------------------------------------

has_header() {
  local flags=() prefix
  IFS=: read -ra prefixes <<<"${CMAKE_PREFIX_PATH:-}"
  for prefix in "${prefixes[@]}"; do flags+=(-isystem "$prefix/include"); done
  printf '#if !(%s)\n#error missing\n#endif\n' "$1" | "${CXX:-c++}" "${flags[@]}" -E -x c++ - >/dev/null 2>&1
}

missing_packages() {
  packages=()
  command -v "${CXX:-c++}" >/dev/null || packages+=(g++)
  command -v cmake >/dev/null || packages+=(cmake)
  command -v ninja >/dev/null || packages+=(ninja-build)
  # Without a compiler nothing can be asked of headers: then all three, which apt-get leaves alone where they are.
  has_header '__has_include(<boost/program_options.hpp>)' || packages+=(libboost-program-options-dev)
  has_header '__has_include(<catch2/catch.hpp>) || __has_include(<catch2/catch_all.hpp>)' || packages+=(catch2)
  has_header '__has_include(<nlohmann/json.hpp>)' || packages+=(nlohmann-json3-dev)
  if [[ $torch_from == venv && ! -e $venv/.complete ]]; then
    python3 -c 'import ensurepip, venv' 2>/dev/null || packages+=(python3 python3-venv)
  fi
  # They only make it faster, so they are not asked for alone.
  if ((${#packages[@]})); then packages+=(ccache mold); fi
}

install_tools() {
  missing_packages
  if ((${#packages[@]} == 0)); then
    note="compiler, CMake, Ninja, Boost, Catch2, nlohmann-json: there"
  else
    local sudo=()
    if [[ $(id -u) != 0 ]]; then sudo=(sudo); fi
    if ! command -v apt-get >/dev/null; then
      note="missing, in Debian's names: ${packages[*]}; install them, then run the same command again"
      return 1
    elif ((${#sudo[@]})) && { ! command -v sudo >/dev/null || { ! sudo -n true && [[ ! -t 0 ]]; }; }; then
      note="as root, run this, then the same command again:
apt-get install -y ${packages[*]}"
      return 1
    fi
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${packages[@]}" || {
      note="try it by hand, then run the same command again: ${sudo[*]} apt-get install -y ${packages[*]}"
      return 1
    }
    note="installed ${packages[*]}"
  fi
  local cmake_version
  cmake_version=$(cmake --version | sed -n '1s/.* //p')
  at_least "$cmake_version" "$oldest_cmake" || {
    note="CMake is $cmake_version, and $oldest_cmake is needed: python3 -m pip install cmake, or a newer distribution"
    return 1
  }
}

# ---- 2. libtorch -------------------------------------------------------------------------------------------------

has_libtorch() {
  local way
  for way in "" /torch /.. /../.. /../../.. /libtorch; do
    if [[ -e $1$way/lib/libtorch_cpu.so ]]; then return 0; fi
  done
  return 1
}

# Sets torch_from: named (CMake finds it by Torch_DIR or CMAKE_PREFIX_PATH), python3 or venv.
choose_libtorch() {
  local prefix version
  venv=$cache/venv-torch-$torch_version
  python=""
  if [[ -n ${Torch_DIR:-}${TORCH_ROOT:-} ]]; then
    torch_from=named
    return
  fi
  IFS=: read -ra prefixes <<<"${CMAKE_PREFIX_PATH:-}"
  for prefix in "${prefixes[@]}"; do
    if has_libtorch "$prefix"; then
      torch_from=named
      return
    fi
  done
  # The version is read, not imported, which would take seconds.
  if [[ -z ${LIBDDP_TORCH_VERSION:-} ]]; then
    version=$(python3 -c 'import importlib.metadata as m, importlib.util as u; print(m.version("torch") if u.find_spec("torch") else "")' 2>/dev/null) || version=""
    if [[ -n $version ]] && at_least "${version%%[+a-z]*}" "$oldest_torch"; then
      torch_from=python3
      python=$(command -v python3)
      return
    fi
  fi
  torch_from=venv
  python=$venv/bin/python
}

install_libtorch() {
  case $torch_from in
    named) note="the one that Torch_DIR or CMAKE_PREFIX_PATH names" ;;
    python3) note="the torch of $python" ;;
    venv)
      if [[ -e $venv/.complete ]]; then
        note="torch $torch_version in $venv"
        return
      fi
      mkdir -p "$cache"
      exec 8>"$venv.lock"
      flock 8 # another quickstart may be at it
      if [[ ! -e $venv/.complete ]]; then
        # numpy only silences a warning of torch.
        # shellcheck disable=SC2086
        if ! { python3 -m venv "$venv" &&
          "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off \
            "torch==$torch_version" numpy ${LIBDDP_PIP_ARGS:-} &&
          "$venv/bin/python" -c 'import torch; print(torch.__version__)' &&
          touch "$venv/.complete"; }; then
          note="torch $torch_version could not be installed in $venv"
          return 1
        fi
      fi
      exec 8>&-
      note="fetched torch $torch_version into $venv"
      ;;
  esac
}

# ---- 3. configure and build --------------------------------------------------------------------------------------

configure() {
  local arguments=(--preset release -S "$repo" -B "$build" -U Torch_DIR)
  if [[ -n $python ]]; then arguments+=("-DLIBDDP_PYTHON=$python"); fi
  if [[ -n ${LIBDDP_JOBS:-} ]]; then arguments+=("-DLIBDDP_JOBS=$LIBDDP_JOBS"); fi
  # shellcheck disable=SC2206
  arguments+=(${LIBDDP_CMAKE_ARGS:-})
  local wanted="${arguments[*]} ${Torch_DIR:-} ${TORCH_ROOT:-} ${CMAKE_PREFIX_PATH:-}"
  # Ninja runs CMake again by itself when a CMake file changes: here only when the settings do.
  if [[ -e $build/build.ninja && -e $build/quickstart.env && $(cat "$logs/configured" 2>/dev/null) == "$wanted" ]]; then
    note="done before, in $build"
  else
    (cd "$repo" && cmake "${arguments[@]}") || {
      note=$(grep -A 3 -h 'libddp:' "$logs/configure.log" | tr '\n' ' ' | sed 's/  */ /g')
      return 1
    }
    printf '%s' "$wanted" >"$logs/configured"
    note="in $build"
  fi
  # Where libtorch is, as CMake found it: LIBTORCH_ROOT, LIBTORCH_VERSION, LIBTORCH_PYTHON.
  # shellcheck disable=SC1091
  source "$build/quickstart.env"
}

compile() {
  # On a terminal the count of ninja ("[12/80]") is shown while it runs.
  local log=$logs/build.log shower=""
  if [[ -t 3 ]]; then
    while sleep 1; do
      printf '\r\033[Klibddp: build      %s' "$(grep -o '^\[[0-9/]*\]' "$log" | tail -n 1)" >&3
    done &
    shower=$!
  fi
  local status=0
  ninja -C "$build" "$@" || status=$?
  if [[ -n $shower ]]; then
    kill "$shower" 2>/dev/null
    wait "$shower" 2>/dev/null || true
  fi
  if ((status != 0)); then
    note=$(grep -m 1 -E 'error:|^FAILED' "$log" || true)
    return 1
  fi
  if grep -q 'no work to do' "$log"; then note="nothing to do"; else note="$(grep -c '^\[' "$log") steps"; fi
}

set_up() {
  choose_libtorch
  step tools install_tools
  choose_libtorch # python3 may be new
  step libtorch install_libtorch
  step configure configure
  step build compile "$@"
}

# ---- 4. what it is for -------------------------------------------------------------------------------------------

# A signal for the run goes to the ranks, once each. ddprun passes it on. torchrun would neither wait for them nor end
# without a stack trace, so there it goes to the workers themselves, which live in sessions of their own.
pass_on() {
  local to=("$launcher")
  ((++signals))
  if [[ -n $LIBTORCH_PYTHON ]]; then
    # shellcheck disable=SC2207
    to=($(cat /proc/"$launcher"/task/*/children 2>/dev/null))
    if ((signals > 1 || ${#to[@]} == 0)); then kill -KILL "$launcher" 2>/dev/null || true; fi
  fi
  # Not patient: the second signal makes a rank leave without saving.
  if ((signals > 1)); then say "stopping at once; the last checkpoint stands"; fi
  if ((${#to[@]})); then kill "-$1" "${to[@]}" 2>/dev/null || true; fi
}

# launch N PROGRAM ARGUMENT...: under torchrun, or without Python under ddprun.
launch() {
  local n=$1 status before
  shift
  signals=0
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  set -m # a process group for the launcher: Ctrl-C comes here alone and is passed on
  if [[ -n $LIBTORCH_PYTHON ]]; then
    "$LIBTORCH_PYTHON" -m torch.distributed.run --standalone --no-python --nproc-per-node "$n" "$@" </dev/null &
  else
    "$build/bin/ddprun" -n "$n" "$@" </dev/null &
  fi
  launcher=$!
  set +m
  trap 'pass_on INT' INT
  trap 'pass_on TERM' TERM HUP
  while :; do # a trapped signal ends `wait` early: then wait again
    before=$signals status=0
    wait "$launcher" 2>/dev/null || status=$?
    if ((signals == before)); then break; fi
  done
  trap - INT TERM HUP
  return "$status"
}

# given NAME ARGUMENT...: whether the user said it himself.
given() {
  local name=$1 argument
  shift
  for argument; do
    case $argument in "$name" | "$name="*) return 0 ;; esac
  done
  return 1
}

train() {
  set_up qwen_pretrain ddprun
  local ranks=${LIBDDP_TRAIN_RANKS:-2} directory=${LIBDDP_TRAIN_DIR:-$repo/runs/tiny} arguments=()
  given --preset "$@" || arguments+=(--preset tiny)
  given --data "$@" || given --random-data "$@" || arguments+=(--data "${LIBDDP_TRAIN_DATA:-$LIBTORCH_ROOT/include}")
  given --checkpoint-dir "$@" || arguments+=(--checkpoint-dir "$directory")
  if [[ -n ${LIBDDP_TRAIN_STEPS:-} ]]; then arguments+=(--max-steps "$LIBDDP_TRAIN_STEPS"); fi
  say "train      $ranks ranks; Ctrl-C saves and stops, the same command again resumes"
  launch "$ranks" "$build/bin/qwen_pretrain" "${arguments[@]}" "$@"
}

tests() {
  set_up all
  local jobs
  jobs=$(nproc) # tests that need all cores run alone, whatever this is
  exec ctest --test-dir "$build" --output-on-failure --no-tests=error -j "$jobs" "$@"
}

bench() {
  set_up all
  command -v python3 >/dev/null || die "the comparison is a Python script: apt-get install python3"
  exec python3 "$repo/benchmarks/compare.py" --build "$build" "$@"
}

exec 3>&1 # the terminal, for steps whose own output goes to a log
command=${1:-help}
if (($#)); then shift; fi
case $command in
  train) train "$@" ;;
  test) tests "$@" ;;
  build) set_up all ;;
  bench) bench "$@" ;;
  help | -h | --help) usage ;;
  *)
    usage >&2
    die "'$command' is no command of this script"
    ;;
esac
