"""Twenty mistakes in the source, each against a guarantee, and the tests of `make test` that are to catch it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """An edit of one file, whose old text occurs there once."""

    name: str
    guarantee: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Files, or single tests, that are expected to fail."""


SCHEDULES = "lab/tests/test_schedules.py"
FIT, FAILURES, RESUME = "tests/e2e/test_fit.py", "tests/e2e/test_failures.py", "tests/e2e/test_resume.py"
ROUNDS, MEMBERSHIP = "tests/simulated/test_rounds.py", "tests/simulated/test_membership.py"

MUTATIONS = (
    Mutation(
        name="gradients are added to those of the step before",
        guarantee="one worker equals plain PyTorch",
        file="src/thinwire/replicas/gradients.py",
        old="  # what zero_grad does, which takes 20 times as long to get there\n            parameter.grad = None\n",
        new="\n            pass\n",
        tests=(f"{FIT}::test_one_worker_equals_plain_training_bit_for_bit_and_exchanges_nothing",),
    ),
    Mutation(
        name="an epoch leaves its last short batch out",
        guarantee="every row once an epoch",
        file="src/thinwire/data/sampling.py",
        old="self.batches_per_epoch = -(-num_rows // batch_size)",
        new="self.batches_per_epoch = max(num_rows // batch_size, min(num_rows, 1))",
        tests=("tests/unit/data/test_sampling.py",),
    ),
    Mutation(
        name="the owner of a slice keeps its sum as it was before packing",
        guarantee="a joint model equal bit for bit on all workers",
        file="src/thinwire/exchange/round.py",
        old="        codec.decode(packed, self.size(index), out=mean)\n",
        new="        mean.copy_(total)\n",
        tests=(ROUNDS,),
    ),
    Mutation(
        name="what a worker hands over arrives without the model",
        guarantee="all workers that see the run to its end end on the same model",
        file="src/thinwire/exchange/joint.py",
        old="self.state, self.landed, self.version, self.cuts = type(self.state)(*fresh), landed, version, cuts",
        new="self.landed, self.version, self.cuts = landed, version, cuts",
        tests=(f"{SCHEDULES}::test_whatever_goes_wrong_what_must_hold_holds",),
    ),
    Mutation(
        name="rounds that wait for a lost message are left to wait",
        guarantee="everything ends within its deadline",
        file="src/thinwire/coordinator/membership.py",
        old="                found.append(stalled)\n",
        new="",
        tests=(MEMBERSHIP,),
    ),
    Mutation(
        name="a message that a broken connection took is not sent again",
        guarantee="messages between coordinator and workers arrive once",
        file="src/thinwire/transport/reliable.py",
        old="            if said.mark < seen:\n",
        new="            if said.mark < 0:\n",
        tests=(f"{SCHEDULES}::test_whatever_goes_wrong_what_must_hold_holds",),
    ),
    Mutation(
        name="a resumed optimizer begins without its state",
        guarantee="resume equals an unbroken run, bit for bit",
        file="src/thinwire/replicas/learning.py",
        old='        self.optimizer.load_state_dict(tree["optimizer"])\n',
        new="",
        tests=(f"{RESUME}::test_a_run_cut_short_twice_comes_to_the_same_parameters_bit_for_bit",),
    ),
    Mutation(
        name="a killed worker is not replaced",
        guarantee="a killed worker costs the others no step",
        file="src/thinwire/cluster/local.py",
        old="        if self._restarts >= self._cluster.max_restarts:\n",
        new="        if self._restarts <= self._cluster.max_restarts:\n",
        tests=(f"{FAILURES}::test_a_worker_process_killed_by_sigkill_is_replaced_and_costs_the_others_no_step",),
    ),
    Mutation(
        name="a replacement starts its shard again from the beginning",
        guarantee="at most a heartbeat's worth of rows is repeated",
        file="src/thinwire/coordinator/membership.py",
        old='            entry["position"] = last.get("position")\n',
        new='            entry["position"] = None\n',
        tests=(f"{SCHEDULES}::test_whatever_goes_wrong_what_must_hold_holds",),
    ),
    Mutation(
        name="a worker that Spark is starting again is not waited for",
        guarantee="a killed executor does not stop the others",
        file="src/thinwire/cluster/spark.py",
        old="        return self._job.is_alive()\n",
        new="        return False\n",
        tests=("tests/spark/test_executors_die.py::test_two_at_once_under_a_barrier",),
    ),
    Mutation(
        name="a worker that is heard again is told to leave",
        guarantee="a worker on Spark that could not be heard takes its place back",
        file="src/thinwire/coordinator/membership.py",
        old="        if revives and attempt >= self.roster.attempts.get(worker, attempt + 1) and not done:\n",
        new="        if revives and attempt > self.roster.attempts.get(worker, attempt + 1) and not done:\n",
        tests=(MEMBERSHIP,),
    ),
    Mutation(
        name="Ctrl-C ends the run at once",
        guarantee="Ctrl-C leaves a checkpoint",
        file="src/thinwire/run/driver.py",
        old="                            coordinator.interrupt()\n",
        new="                            raise\n",
        tests=(f"{RESUME}::test_ctrl_c_leaves_a_checkpoint_and_says_how_to_go_on",),
    ),
    Mutation(
        name="workers that fetch their rows leave those for validation where they are",
        guarantee="the same recipe on Spark and on one machine gives the same parameters",
        file="src/thinwire/cluster/base.py",
        old="Fetched(files[0].validation is not None)",
        new="Fetched(False)",
        tests=(
            "tests/spark/test_fit_on_spark.py"
            "::test_the_same_recipe_and_seed_give_the_same_parameters_on_spark_as_on_local",
        ),
    ),
    Mutation(
        name="a file is written where it is read",
        guarantee="checkpoints are whole or absent",
        file="src/thinwire/checkpoint/files.py",
        old="        os.replace(temporary, path)\n",
        new='        os.unlink(temporary)\n        with open(path, "wb") as file:\n            file.write(data)\n',
        tests=("tests/unit/checkpoint/test_files.py", "tests/unit/checkpoint/test_kill.py"),
    ),
    Mutation(
        name="a part is not compared with its digest",
        guarantee="a damaged checkpoint is passed over",
        file="src/thinwire/checkpoint/store.py",
        old='    return "" if digest == part.digest else ',
        new='    return "" if digest else ',
        tests=(f"{RESUME}::test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it",),
    ),
    Mutation(
        name="connections with any key are let in",
        guarantee="strangers change nothing",
        file="src/thinwire/transport/zmq.py",
        old="        allowed = key == self._allowed or key == zmq.utils.z85.encode(self._allowed)\n",
        new="        allowed = bool(key)\n",
        tests=(
            "tests/security/test_strangers.py"
            "::test_who_lacks_the_keys_is_counted_at_the_driver_and_at_a_worker_and_heard_by_neither",
        ),
    ),
    Mutation(
        name="headers from the network are unpickled",
        guarantee="no unpickling of bytes from the network or from a checkpoint",
        file="src/thinwire/transport/zmq.py",
        old="        header = json.loads(bytes(",
        new="        import pickle\n\n        header = pickle.loads(bytes(",
        tests=("tests/contracts/test_contracts.py", "tests/security/test_unpickling.py"),
    ),
    Mutation(
        name="a contribution that missed its round is forgotten",
        guarantee="what is contributed is never lost",
        file="src/thinwire/exchange/round.py",
        old="        if sent is None:\n            residual.add_(values)\n",
        new="        if sent is None:\n            pass\n",
        tests=(ROUNDS,),
    ),
    Mutation(
        name="a loss that is not finite is trained on",
        guarantee="no NaN and no infinity becomes the joint model",
        file="src/thinwire/worker/nonfinite.py",
        old="drops, anew = replica.agree(flaw is not None, self._anew)",
        new="drops, anew = replica.agree(False, self._anew)",
        tests=(
            "tests/simulated/test_nonfinite.py::test_a_step_that_is_not_taken_leaves_momentum_and_running_statistics_as_they_were",
        ),
    ),
    Mutation(
        name="the rest of a broken group goes on alone",
        guarantee="a group that loses a worker comes together again",
        file="src/thinwire/coordinator/membership.py",
        old="[Lost(worker, attempt, reason, seat.host), *(Send(s.worker, s.attempt, Stand()) for s in others)]",
        new="[Lost(worker, attempt, reason, seat.host)]",
        tests=("tests/simulated/test_groups.py",),
    ),
)
