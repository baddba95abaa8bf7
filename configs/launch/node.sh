#!/usr/bin/env bash
# Starts the ranks of one node, and ends with their status: 143 when they were told to end and saved.
#
#   NODES=2 NODE=0 MASTER_ADDR=node1 bash node.sh 8 -m dsx.run SCRIPT [its arguments]
#
# 8 is the number of ranks on this node, which is number NODE (0) of NODES (1) in its cluster; they
# meet at MASTER_ADDR:MASTER_PORT (127.0.0.1:29500), rank 0's node. torchrun does as much, but it
# kills ranks 30 s after it was told to end: here they have the time that whoever tells them gives.
set -uo pipefail

(($# >= 2)) || { echo "usage: node.sh RANKS_PER_NODE -m dsx.run SCRIPT [arguments]" >&2; exit 2; }
ranks=$1
shift
export LOCAL_WORLD_SIZE=$ranks WORLD_SIZE=$((${NODES:-1} * ranks))
export MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} MASTER_PORT=${MASTER_PORT:-29500}

processes=()
told=0
pass_on() {
  told=$((told + 1))
  kill -TERM "${processes[@]}" 2>/dev/null
}
trap pass_on TERM INT HUP
if [[ -n ${PID_FILE:-} ]]; then
  echo $$ >"$PID_FILE"
  trap 'rm -f "$PID_FILE"' EXIT
fi

for ((local_rank = 0; local_rank < ranks; local_rank++)); do
  RANK=$((${NODE:-0} * ranks + local_rank)) LOCAL_RANK=$local_rank \
    "${PYTHON:-python}" -u "$@" &
  processes+=($!)
done

# The status is that of the first rank that fails; the others would wait for it, and are told to end.
# Ranks are looked for, and waited for once they have ended: a signal ends any other wait.
status=0
while ((${#processes[@]} > 0)); do
  for place in "${!processes[@]}"; do
    process=${processes[place]} before=$told
    kill -0 "$process" 2>/dev/null && continue
    wait "$process"
    found=$?
    if ((told != before)); then # the status may be that of a signal which came meanwhile
      wait "$process"
      again=$?
      ((again == 127)) || found=$again
    fi
    unset "processes[place]"
    if ((found != 0 && status == 0)); then
      status=$found
      pass_on
    fi
  done
  sleep 0.2
done
exit "$status"
