#!/usr/bin/env bash
# Runs lowlat on this machine's AMD GPUs and writes what they did to amd-report.txt in the current
# folder, to be sent back; docs/amd.md says what it answers. About ten minutes, most of them to
# build. Exit status 0 when everything ran and held, else 1.
#
#   tests/tools/amd_report.sh                builds into build/amd first
#   tests/tools/amd_report.sh --built DIR    runs what was built there
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=$root/build/amd
nothing_ran=77 # the test program's own status
budget_s=600

if [ "${1-}" = --built ]; then
  build=$2
else
  python3 -m venv "$root/build/amd-venv"
  "$root/build/amd-venv/bin/pip" install -q cmake ninja 'ziglang==0.17.1'
  export PATH=$root/build/amd-venv/bin:$PATH
  cmake -G Ninja -S "$root" -B "$build" -DLOWLAT_HIP=ON -DLOWLAT_CUDA=OFF
  cmake --build "$build" -t test_host_amd_gpu
fi

machine() {
  echo "lowlat $(git -C "$root" rev-parse HEAD 2>/dev/null || echo 'of no commit')"
  echo "ROCm $(cat /opt/rocm/.info/version 2>/dev/null || echo 'not in /opt/rocm')"
  { rocminfo 2>/dev/null || echo 'no rocminfo'; } |
    grep -E 'Name: +gfx|Marketing|no rocminfo' || true
}

runs() {
  local status=0 one
  for run in 1 2 3; do
    echo "run $run of 3"
    one=0
    timeout -k 5 "$budget_s" "$build/test_host_amd_gpu" || one=$?
    if [ "$one" = "$nothing_ran" ]; then
      echo 'nothing ran on an AMD GPU: the lines above say what is missing'
      return 1
    fi
    [ "$one" = 0 ] || { status=1 && echo "run $run ended with status $one"; }
  done
  return "$status"
}

{ machine && runs; } 2>&1 | tee amd-report.txt
