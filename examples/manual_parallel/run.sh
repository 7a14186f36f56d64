#!/bin/bash
# Trains on this host with 8 processes:
#
#     bash run.sh [mpirun | torchrun | scheduler] [options of train.py]
#
# DATA_PATH may be the folder of MNIST's files; without it, scikit-learn's digits are used. The log of each rank is
# log_output/1/rank.N/stdout, here. WORKERS may be set to another number, and PYTHON to another Python.

launcher=mpirun
case $1 in mpirun | torchrun | scheduler)
    launcher=$1
    shift
    ;;
esac
workers=${WORKERS:-8} python=${PYTHON:-python}
train=$(dirname "${BASH_SOURCE[0]}")/train.py
threads=$(($(getconf _NPROCESSORS_ONLN) / workers))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))} # or each rank would take all cores

# Each process knows its rank, and writes into a folder of its own; where Open MPI would put logs differs by its version.
# shellcheck disable=SC2016
logged='log=log_output/1/rank.${OMPI_COMM_WORLD_RANK:-${RANK:-$MS_NODE_ID}}
mkdir -p "$log"
exec "$0" "$@" >"$log/stdout" 2>&1'

rm -rf log_output
case $launcher in
mpirun)
    mpirun -n "$workers" --oversubscribe bash -c "$logged" "$python" "$train" "$@" >/dev/null
    status=$?
    ;;
torchrun)
    "$python" -m torch.distributed.run --nproc-per-node "$workers" --no-python \
        bash -c "$logged" "$python" "$train" "$@" 2>/dev/null
    status=$?
    ;;
scheduler)
    export MS_WORKER_NUM=$workers MS_SCHED_HOST=${MS_SCHED_HOST:-127.0.0.1} MS_SCHED_PORT=${MS_SCHED_PORT:-8118}
    pids=()
    trap 'kill "${pids[@]}" 2>/dev/null' EXIT
    MS_ROLE=MS_SCHED "$python" "$train" "$@" >scheduler.txt 2>&1 &
    pids+=("$!")
    for ((i = 0; i < workers; i++)); do
        MS_ROLE=MS_WORKER MS_NODE_ID=$i bash -c "$logged" "$python" "$train" "$@" &
        pids+=("$!")
    done
    status=0
    for pid in "${pids[@]}"; do
        wait "$pid" || status=$?
    done
    ;;
esac
((status)) && tail -n 1 log_output/1/rank.*/stdout >&2
exit "$status"
