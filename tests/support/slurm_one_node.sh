#!/usr/bin/env bash
# Runs a command in a Slurm of one node that lives as long as the command: no system service, no set-up, ports and folders
# of its own. Exit code: the command's; 77 and a line "SKIPPED: reason" when there is no Slurm or it cannot start.
#
#   slurm_one_node.sh srun -n 2 ./mini_train
#
# Debian and Ubuntu: apt-get install --no-install-recommends slurmd slurmctld slurm-client munge
set -u
skip() { echo "SKIPPED: $*"; exit 77; }

for program in munged slurmctld slurmd srun sinfo; do
  PATH=$PATH:/usr/sbin:/sbin command -v "$program" >/dev/null || skip "no $program (apt-get install slurmd slurmctld slurm-client munge)"
done
PATH=$PATH:/usr/sbin:/sbin

dir=$(mktemp -d /tmp/slurm.XXXXXX) || exit 1  # short: a socket's path has at most 107 characters
host=$(hostname -s)
port=$((12000 + $$ * 2 % 6000))
daemons=()
cleanup() {
  # Their state is thrown away, so they need not put it in order, which takes the controller seconds.
  disown -a
  kill -KILL "${daemons[@]}"
  rm -rf "$dir"
}
trap cleanup EXIT
trap 'exit 143' TERM INT HUP

mkdir "$dir"/{state,spool,munge}
chmod 700 "$dir/munge"
head -c 128 /dev/urandom >"$dir/munge/key" && chmod 400 "$dir/munge/key"
cat >"$dir/slurm.conf" <<CONF
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1
KillWait=5
NodeName=one NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=4 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
export SLURM_CONF=$dir/slurm.conf

munged --foreground --force --key-file="$dir/munge/key" --socket="$dir/munge/socket" --pid-file="$dir/munge/pid" \
  --log-file="$dir/munge/log" --seed-file="$dir/munge/seed" >"$dir/munged.out" 2>&1 &
daemons+=($!)
for _ in {1..100}; do [ -S "$dir/munge/socket" ] && break; sleep 0.05; done
slurmctld -D >"$dir/slurmctld.out" 2>&1 &
daemons+=($!)
slurmd -D -N one >"$dir/slurmd.out" 2>&1 &
daemons+=($!)
for _ in {1..100}; do
  [ "$(sinfo -h -o %t 2>/dev/null)" = idle ] && break
  sleep 0.1
done
if [ "$(sinfo -h -o %t 2>/dev/null)" != idle ]; then
  skip "Slurm cannot start: $(grep -h -i -E 'error|fatal' "$dir"/slurm*.out "$dir"/slurm*.log "$dir/munged.out" 2>/dev/null | tail -n 1)"
fi

cd "${SLURM_TEST_DIR:-$PWD}" || exit 1
"$@"
