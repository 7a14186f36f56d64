#!/bin/bash
# Trains on this host with one scheduler and 8 workers:
#
#     bash run.sh DATA_PATH [options of train.py]
#
# DATA_PATH is the folder cifar-10-batches-bin. The logs are scheduler.txt and worker_0.txt to worker_7.txt, here.
# MS_WORKER_NUM, MS_SCHED_HOST and MS_SCHED_PORT may be set to others, and PYTHON to another Python.

if [ $# -lt 1 ] || [[ $1 == -* ]]; then
    echo "Please run the script with the path of the data set, such as: bash run.sh /path/cifar-10-batches-bin" >&2
    exit 2
fi
export DATA_PATH=$1
shift
if [ ! -d "$DATA_PATH" ]; then
    echo "$DATA_PATH is not a folder; give the folder cifar-10-batches-bin" >&2
    exit 2
fi

export MS_WORKER_NUM=${MS_WORKER_NUM:-8} MS_SCHED_HOST=${MS_SCHED_HOST:-127.0.0.1} MS_SCHED_PORT=${MS_SCHED_PORT:-8117}
threads=$(($(getconf _NPROCESSORS_ONLN) / MS_WORKER_NUM))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))} # or each worker would take all cores

here=$(dirname "${BASH_SOURCE[0]}")
pids=() logs=() gone=()

start() { # LOG [options]: a process that writes to LOG
    local log=$1
    shift
    "${PYTHON:-python}" "$here/train.py" "$@" >"$log" 2>&1 &
    pids+=("$!") logs+=("$log")
}

destroy() { # STATUS: end at once what still runs
    kill -KILL "${pids[@]}" 2>/dev/null
    wait
    exit "$1"
}

finish() { # STATUS: have the workers end; one that keeps checkpoints saves one first, for which it needs the others
    trap "destroy $1" INT TERM
    kill "${pids[@]:1}" 2>/dev/null
    wait "${pids[@]:1}"
    for ((i = 0; i < 50; i++)); do # the scheduler ends when its workers have, if they had reached it
        kill -0 "${pids[0]}" 2>/dev/null || break
        sleep 0.1
    done
    destroy "$1"
}
trap 'finish 130' INT
trap 'finish 143' TERM

MS_ROLE=MS_SCHED start scheduler.txt "$@"
echo "scheduler start success!"
for ((i = 0; i < MS_WORKER_NUM; i++)); do
    MS_ROLE=MS_WORKER MS_NODE_ID=$i start "worker_$i.txt" "$@"
    echo "worker $i start success with pid ${pids[i + 1]}"
done

# When one fails, the scheduler ends the others within seconds; one that had not reached it yet would wait for long.
status=0 running=1
while ((running)); do
    sleep 0.2
    running=0
    for n in "${!pids[@]}"; do
        if kill -0 "${pids[n]}" 2>/dev/null; then
            running=1
            continue
        fi
        ((gone[n])) && continue
        wait "${pids[n]}"
        ended=$? gone[n]=1
        if ((ended)); then
            echo "${logs[n]} ends with status $ended: $(grep -v '^ *$' "${logs[n]}" | tail -n 1)" >&2
            ((status)) || { status=$ended deadline=$((SECONDS + 20)); }
        fi
    done
    if ((running && status && SECONDS >= deadline)); then
        destroy "$status"
    fi
done
exit "$status"
