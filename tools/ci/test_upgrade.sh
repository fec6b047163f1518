#!/usr/bin/env bash
# Rolling upgrades: the last release of the protocol before this one, built from its commit, beside this one. This agent
# serves the older trainer and receivers (full, delta), the older agent newer receivers, and each takes over the other's
# segment while a receiver follows. Every directory that was pulled is compared with what was published, byte for byte.
#
#   tools/ci/test_upgrade.sh [BUILD]     BUILD: where this tree is built (default: build); it is built if it is not
#
# Where the commit is not in this clone's history (a shallow one), it says SKIPPED and why, and succeeds.
set -euo pipefail
cd "$(dirname "$0")/../.."

old_commit=cbf009b  # protocol 4
new=$(realpath -m "${1:-build}")
jobs=$(nproc)
old=$PWD/build/upgrade/old
source=$PWD/build/upgrade/source

if ! git cat-file -e "$old_commit^{commit}" 2>/dev/null; then
  echo "upgrade: SKIPPED: this clone has no commit $old_commit, from which the older release is built (git fetch --unshallow)"
  exit 0
fi

# Both releases. The older one is built once.
if [[ ! -x $old/bin/deltasync || ! -x $old/bin/deltasync-agent ]]; then
  rm -rf "$source"
  mkdir -p "$source"
  git archive "$old_commit" | tar -x -C "$source"
  cmake -S "$source" -B "$old" -G Ninja -DCMAKE_BUILD_TYPE=Release -DDELTASYNC_BUILD_TESTS=OFF >/dev/null
  cmake --build "$old" -j "$jobs" --target deltasync deltasync-agent
fi
if [[ ! -x $new/bin/deltasync || ! -x $new/bin/deltasync-agent ]]; then
  cmake -S . -B "$new" -G Ninja -DCMAKE_BUILD_TYPE=Release >/dev/null
  cmake --build "$new" -j "$jobs" --target deltasync deltasync-agent
fi

work=$(mktemp -d)
shm=$(mktemp -d -p /dev/shm) # on a disk an agent takes over only what this boot is known to have made
agent=
follower=
socket=$work/agent.sock
clean() {
  local status=$?
  trap - EXIT INT TERM
  for pid in $follower $agent; do
    kill -KILL "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
  done
  rm -rf "$work" "$shm"
  exit "$status"
}
trap clean EXIT
trap 'exit 130' INT TERM

fail() {
  echo "upgrade: FAILED: $*" >&2
  tail -n 20 "$work"/*.log >&2 || true
  exit 1
}

# Five versions of a small model, one in fifty elements changed from each to the next.
python3 - "$work" <<'PYTHON'
import json, pathlib, random, struct, sys

random.seed(5)
shapes = {"embed.weight": [512, 256], "layer.0.up.weight": [256, 700], "layer.0.norm.weight": [256]}
values = {name: [random.getrandbits(16) & 0xBFFF for _ in range(shape[0] * (shape[1] if len(shape) > 1 else 1))]
          for name, shape in shapes.items()}
for version in range(5):
    header, data = {}, b""
    for name, shape in shapes.items():
        for _ in range(len(values[name]) // 50):
            values[name][random.randrange(len(values[name]))] ^= random.getrandbits(5)
        raw = struct.pack(f"<{len(values[name])}H", *values[name])
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    model = pathlib.Path(sys.argv[1], f"v{version}")
    model.mkdir()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (model / "config.json").write_text('{"model_type": "small"}')
PYTHON
(umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$work/token")

# start_agent RELEASE [PORT]: and waits until it is ready; its port is then $port.
start_agent() {
  rm -f "$work/ready"
  "$1/bin/deltasync-agent" --name upgrade --shm-dir "$shm" --socket "$socket" --listen "127.0.0.1:${2:-0}" --http off \
    --token-file "$work/token" --ready-file "$work/ready" >>"$work/agent.log" 2>&1 &
  agent=$!
  for _ in $(seq 600); do
    [[ -s $work/ready ]] && break
    kill -0 "$agent" 2>/dev/null || fail "the agent of $1 ended"
    sleep 0.1
  done
  [[ -s $work/ready ]] || fail "the agent of $1 did not get ready"
  port=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["port"])' "$work/ready")
}

stop_agent() {
  kill -"${1:-TERM}" "$agent"
  wait "$agent" 2>/dev/null || true
  agent=
}

# publish RELEASE VERSION...
publish() {
  local release=$1 models=() version
  shift
  for version in "$@"; do models+=(--model "$work/v$version"); done
  "$release/bin/deltasync" publish --agent "$socket" --deadline-s 120 "${models[@]}" >>"$work/publish.log" 2>&1 ||
    fail "publishing $* by $release"
}

same() { diff -rq "$work/$1" "$work/out/current" >/dev/null 2>&1; }

# pull RELEASE VERSION MODE: into out, which then holds exactly that version.
pull() {
  local mode
  "$1/bin/deltasync" pull --from "127.0.0.1:$port" --token-file "$work/token" --out "$work/out" --deadline-s 120 --json \
    >"$work/pulled.json" 2>>"$work/pull.log" || fail "pulling v$2 by $1"
  mode=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["mode"])' "$work/pulled.json")
  [[ $mode == "$3" ]] || fail "v$2 came to $1 as $mode, not $3"
  same "v$2" || fail "out holds other bytes than v$2"
}

# await VERSION: the follower has it.
await() {
  for _ in $(seq 1200); do
    same "v$1" && return
    kill -0 "$follower" 2>/dev/null || fail "the follower ended before v$1"
    sleep 0.1
  done
  fail "the follower never got v$1"
}

fresh() { rm -rf "$work/out" "$shm"/upgrade.*; }

# one_side AGENT TRAINER RECEIVER NAME: each of a release.
one_side() {
  fresh
  start_agent "$1"
  publish "$2" 0
  pull "$3" 0 full
  publish "$2" 1
  pull "$3" 1 delta
  publish "$2" 2 3
  pull "$3" 3 delta
  stop_agent
  echo "upgrade: $4: full, delta and several deltas are exact"
}

# Agents are upgraded before trainers: an older agent says so to a newer trainer, at once.
newer_trainer_is_refused() {
  local status=0
  fresh
  start_agent "$old"
  "$new/bin/deltasync" publish --agent "$socket" --deadline-s 120 --model "$work/v0" 2>"$work/refused.log" || status=$?
  ((status == 9)) || fail "a newer trainer got exit code $status from an older agent, not 9 (unsupported)"
  grep -q 'the trainer speaks protocol' "$work/refused.log" || fail "the refusal does not name the protocols"
  stop_agent
  echo "upgrade: an older agent refuses a newer trainer, and says why"
}

# taken_over FIRST SECOND RECEIVER NAME: SECOND's agent goes on with FIRST's segment, ended or killed, under a follower.
taken_over() {
  local signal
  for signal in TERM KILL; do
    fresh
    start_agent "$1"
    publish "$old" 0 1
    "$3/bin/deltasync" pull --follow --from "127.0.0.1:$port" --token-file "$work/token" --out "$work/out" \
      --deadline-s 120 >>"$work/follow.log" 2>&1 &
    follower=$!
    await 1
    stop_agent "$signal"
    start_agent "$2" "$port"
    publish "$old" 2 3
    await 3
    kill -TERM "$follower"
    wait "$follower" 2>/dev/null || true
    follower=
    publish "$old" 4
    pull "$3" 4 delta
    stop_agent
  done
  echo "upgrade: $4: a follower goes on over it, and is exact"
}

one_side "$old" "$old" "$new" "older agent and trainer, newer receiver"
one_side "$new" "$old" "$old" "newer agent, older trainer and receiver"
one_side "$new" "$new" "$old" "newer agent and trainer, older receiver"
one_side "$new" "$old" "$new" "newer agent and receiver, older trainer"
newer_trainer_is_refused
taken_over "$old" "$new" "$old" "an older agent's segment taken over by a newer one, older follower"
taken_over "$old" "$new" "$new" "an older agent's segment taken over by a newer one, newer follower"
taken_over "$new" "$old" "$old" "a newer agent's segment taken over by an older one, older follower"
echo "upgrade: ok"
