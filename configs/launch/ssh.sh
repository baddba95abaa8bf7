#!/usr/bin/env bash
# One cluster over hosts that ssh reaches; the first one is the node of rank 0. Once per site:
#
#   export DSX_RENDEZVOUS=tcp://meet.example.org:29400 DSX_CLUSTER_ID=0 HOSTS="node1 node2"
#   bash ssh.sh 8 -m dsx.run SCRIPT [its arguments]
#
# The folder, dsx's environment and node.sh have to be at the same paths on all hosts. Ctrl-C, or
# kill, has the ranks save and end, with 143.
set -uo pipefail

: "${HOSTS:?are the hosts of this cluster, such as \"node1 node2\"}"
read -ra hosts <<<"$HOSTS"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
variables=(
  "NODES=${#hosts[@]}"
  "MASTER_ADDR=${MASTER_ADDR:-${hosts[0]}}"
  "MASTER_PORT=${MASTER_PORT:-29500}"
  "PYTHON=$(command -v "${PYTHON:-python}")"
)
while IFS='=' read -r name _; do
  [[ $name == DSX_* ]] && variables+=("$name=${!name}")
done < <(env)

remote() { ssh -o BatchMode=yes "$1" "$2" </dev/null; }
connections=()
told=0
# By a connection of its own to each host: those that are open wait for the ranks.
# shellcheck disable=SC2329 # the trap calls it
end_all() {
  told=$((told + 1))
  for node in "${!hosts[@]}"; do
    remote "${hosts[$node]}" "kill -TERM \$(cat /tmp/dsx-node.$$.$node)" &
  done
}
trap end_all TERM INT HUP
for node in "${!hosts[@]}"; do
  words=(env "NODE=$node" "PID_FILE=/tmp/dsx-node.$$.$node" "${variables[@]}" bash "$here/node.sh" "$@")
  remote "${hosts[$node]}" "cd $(printf %q "$PWD") && $(printf '%q ' "${words[@]}")" &
  connections+=($!)
done

status=0
for connection in "${connections[@]}"; do
  while :; do
    before=$told
    wait "$connection"
    found=$?
    ((told == before)) && break # else a signal has ended the wait
  done
  if ((status == 0)); then
    status=$found
  fi
done
exit "$status"
