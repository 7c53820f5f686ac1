"""A real one-node Slurm, started for the test and stopped after it."""

import getpass
import json
import os
import shutil
import socket
import subprocess
import time
from types import SimpleNamespace

import pytest

import oelm.lab.slurm as slurm_module
from oelm.errors import UserError
from oelm.lab.plan import load_plan
from oelm.lab.queue import Queue
from oelm.lab.slurm import queued_jobs, submit
from oelm.lab.status import LabWatcher
from tests.programmes.kill_resume import fingerprint

needs_slurm = pytest.mark.skipif(
    not all(map(shutil.which, ("slurmctld", "slurmd", "sbatch"))),
    reason="Slurm is not installed (Debian: apt install slurmctld slurmd slurm-client)",
)

CONF = """
ClusterName=oelm
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
KillWait=5
JobRequeue=1
SchedulerParameters=sched_interval=2,bf_interval=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    root = tmp_path / "slurm"
    for folder in ("state", "spool"):
        (root / folder).mkdir(parents=True)
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    host = socket.gethostname().partition(".")[0]
    (root / "slurm.conf").write_text(CONF.format(host=host, user=getpass.getuser(), ports=ports, root=root))
    monkeypatch.setenv("SLURM_CONF", str(root / "slurm.conf"))
    daemons = [subprocess.Popen([name, "-D"], stderr=subprocess.DEVNULL) for name in ("slurmctld", "slurmd")]
    try:
        deadline = time.monotonic() + 30
        while "idle" not in subprocess.run(["sinfo"], capture_output=True, text=True).stdout:
            assert time.monotonic() < deadline, (root / "slurmctld.log").read_text()[-2000:]
            time.sleep(0.2)
        yield root
    finally:
        subprocess.run(["scancel", "--full", f"--user={getpass.getuser()}"], capture_output=True)
        time.sleep(1)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()


def make_plan(tmp_path, data, steps=150):
    (tmp_path / "plan.toml").write_text(
        f"""
        [defaults]
        preset = "tiny"
        data_path = "{data}"
        max_steps = {steps}
        val_interval = 25
        device = "cpu"
        threads = 1
        [matrix]
        model_type = ["baseline", "oelm_v2"]
        seed = [1, 2]
        """
    )
    return tmp_path / "plan.toml"


@needs_slurm
def test_an_array_survives_a_preemption_and_ends_in_the_bits_of_local_runs(slurm, oelm, data, tmp_path):
    path = make_plan(tmp_path, data)
    result = oelm("run", path, "--out", tmp_path / "cluster", "--on", "slurm", "--partition", "main", "--time", "30")
    assert result.code == 0, result.err
    assert "submitted 4 runs" in result.out
    plan = load_plan(path, tmp_path / "cluster")
    again = oelm("run", path, "--out", tmp_path / "cluster", "--on", "slurm")
    assert "nothing to submit" in again.out, "a run was submitted twice"
    watcher = LabWatcher(tmp_path / "cluster", plan.runs)
    first = plan.runs[0].folder
    job = next(j for j, name in json.loads((tmp_path / "cluster/.slurm-jobs.json").read_text()).items()
               if name == first.path.name)  # fmt: skip
    states, preempted, hurried, deadline = set(), False, False, time.monotonic() + 240
    while not all(run.folder.finished() for run in plan.runs):
        states |= {status.state for status in watcher.look()}
        if not preempted and first.last_step() >= 20:
            # scancel asks again for a minute and a half while the job is being requeued: once is enough.
            subprocess.run(["timeout", "1", "scancel", "--signal=TERM", job], capture_output=True)
            preempted = True
        waits = queued_jobs(tmp_path / "cluster").get(first.path.absolute(), "")
        if preempted and not hurried and "BeginTime" in waits:
            # Slurm lets a requeued job wait two minutes; the test does not.
            hurried = not subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"]).returncode
        logs = "".join(p.read_text()[-500:] for p in (tmp_path / "cluster/.slurm").glob("*.err"))
        assert time.monotonic() < deadline, f"{states} {logs}"
        time.sleep(0.2)
    assert preempted
    assert {"queued", "running"} <= states
    assert len(json.loads(first.environment.read_text())["parts"]) == 2, "the preempted run has two parts"
    local = load_plan(path, tmp_path / "local")
    assert Queue(local, 2).run() == {}
    for ours, theirs in zip(local.runs, plan.runs, strict=True):
        assert fingerprint(ours.folder) == fingerprint(theirs.folder)


def test_what_slurm_has_in_its_queue_is_seen_from_every_folder_and_by_its_place(tmp_path, monkeypatch):
    for plan in ("one", "two"):
        (tmp_path / plan / "run").mkdir(parents=True)
    (tmp_path / "one" / slurm_module.JOBS_FILE).write_text('{"7_0": "run"}')
    listed = SimpleNamespace(stdout="7_0 PENDING Priority\n8_0 RUNNING None\n")
    monkeypatch.setattr(slurm_module.subprocess, "run", lambda *words, **options: listed)
    for place in (tmp_path, tmp_path / "one", tmp_path / "one/run"):
        assert slurm_module.queued_jobs(place) == {tmp_path / "one/run": "PENDING Priority"}
    assert slurm_module.queued_jobs(tmp_path / "two") == {}


def test_a_plan_with_a_choice_is_refused_on_slurm(tmp_path):
    pytest.importorskip("submitit")
    (tmp_path / "plan.toml").write_text("[matrix]\nmax_lr = [0.1]\nseed = [1]\n[select]\n")
    plan = load_plan(tmp_path / "plan.toml", tmp_path / "out")
    with pytest.raises(UserError, match="select"):
        submit(plan, plan.runs, tmp_path, {})
    assert os.listdir(tmp_path) == ["plan.toml"]
