"""A JobSet: its Jobs, their dependencies, and what the end of each means for all of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from cache_runtimes.local import policies
from cache_runtimes.local.kubelet import Backoff, Events, PodRun, all_done
from cache_runtimes.local.pods import Pod, Process
from cache_runtimes.local.policies import ContainerExit

Json = dict[str, Any]

# Makes the volumes of a pod, which end with the context, and the process of each container.
PlanPod = Callable[[Pod], AbstractContextManager[Mapping[str, Process]]]


@dataclass(frozen=True)
class Console:
    """Where a run reports.

    Attributes:
        event: gets what happens to the job.
        line: gets the pod, the container and a line of its log.
    """

    event: Callable[[str], None]
    line: Callable[[str, str, str], None]


class JobFailed(Exception):
    """A Job has failed.

    Attributes:
        job: its replicated job.
        reason: as in the Job's condition, such as ``BackoffLimitExceeded``.
        pod: the pod that failed it.
        exit: of that pod's container.
    """

    def __init__(self, job: str, reason: str, pod: str, exit: ContainerExit) -> None:
        super().__init__(job, reason, pod, exit)
        self.job = job
        self.reason = reason
        self.pod = pod
        self.exit = exit

    def __str__(self) -> str:
        return (
            f"{self.job}: {self.reason}: {self.pod}/{self.exit.container} ended with exit code "
            f"{self.exit.code}: {self.exit.message}"
        )


class JobRun:
    """One indexed Job: a pod for each index, replaced when it fails."""

    def __init__(
        self,
        job: Json,
        pods: list[Pod],
        plan: PlanPod,
        console: Console,
        changed: Callable[[], None],
        backoff: Backoff,
    ) -> None:
        self._name = job["name"]
        self._spec = job["template"]["spec"]
        self._pods = pods
        self._plan = plan
        self._console = console
        self._changed = changed
        self._backoff = backoff
        self._running: dict[int, PodRun] = {}
        self._succeeded: set[int] = set()
        self._failures = 0  # of pods
        self._restarts: Counter[int] = Counter()  # in place, of the running pods

    @property
    def is_ready(self) -> bool:
        """Whether every pod is ready or has succeeded."""
        ready = {index for index, run in self._running.items() if run.is_ready}
        return len(ready | self._succeeded) >= len(self._pods)

    @property
    def has_succeeded(self) -> bool:
        """Whether every pod has succeeded."""
        return len(self._succeeded) >= len(self._pods)

    async def run(self) -> None:
        """Runs until every index has succeeded.

        Raises:
            JobFailed: by the failure policy of pods, or by too many failures.
        """
        self._console.event(f"{self._name} starts with {len(self._pods)} pods")
        try:
            async with asyncio.TaskGroup() as group:
                for pod in self._pods:
                    group.create_task(self._run_index(pod))
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        self._console.event(f"{self._name} succeeded")

    async def _run_index(self, pod: Pod) -> None:
        failures = 0
        while True:
            exits = await self._run_pod(pod)
            failed = next((ended for ended in exits if ended.code != 0), None)
            if failed is None:
                self._succeeded.add(pod.index)
                self._changed()
                return
            action = policies.after_pod_failure(self._spec, exits)
            if action == "FailJob":
                raise JobFailed(self._name, policies.POD_FAILURE_POLICY, pod.name, failed)
            failures += 1
            if action == "Count":
                self._failures += 1
                self._check_limit(pod, failed)
            self._console.event(
                f"{pod.name} failed: {failed.container} ended with exit code {failed.code}; "
                "another pod takes its place"
            )
            await asyncio.sleep(self._backoff.delay_s(failures))

    def _check_limit(self, pod: Pod, failed: ContainerExit) -> None:
        limit = self._spec.get("backoffLimit", policies.DEFAULT_BACKOFF_LIMIT)
        restarts = self._restarts.total()
        if policies.exceeds_backoff_limit(pod.spec, limit, self._failures, restarts):
            raise JobFailed(self._name, policies.BACKOFF_LIMIT_EXCEEDED, pod.name, failed)

    async def _run_pod(self, pod: Pod) -> list[ContainerExit]:
        def restarted(ended: ContainerExit) -> None:
            self._restarts[pod.index] += 1
            self._check_limit(pod, ended)
            self._console.event(
                f"{pod.name}/{ended.container} ended with exit code {ended.code}; it is restarted "
                "in place"
            )

        def log(container: str, line: str) -> None:
            self._console.line(pod.name, container, line)

        with self._plan(pod) as processes:
            events = Events(log, restarted, self._changed)
            run = self._running[pod.index] = PodRun(pod, processes, events, self._backoff)
            try:
                return await run.run()
            finally:
                del self._running[pod.index]
                del self._restarts[pod.index]
                self._changed()


class JobSetRun:
    """A whole JobSet, with the restarts of its failure policy."""

    def __init__(
        self, jobset: Json, pods: list[Pod], plan: PlanPod, console: Console, backoff: Backoff
    ) -> None:
        self._spec = jobset["spec"]
        self._pods = pods
        self._plan = plan
        self._console = console
        self._backoff = backoff
        self._change = asyncio.Event()

    async def run(self) -> None:
        """Runs until the success policy holds; then stops what still runs.

        Raises:
            JobFailed: the failure policy does not restart after it.
        """
        restarts = 0
        while True:
            try:
                await self._run_once()
                return
            except JobFailed as failed:
                policy = self._spec.get("failurePolicy")
                if not policies.restarts_jobset(policy, failed.job, failed.reason, restarts):
                    raise
                restarts += 1
                self._console.event(f"restart {restarts} of all jobs: {failed}")
                await asyncio.sleep(self._backoff.delay_s(restarts))

    async def _run_once(self) -> None:
        runs: dict[str, JobRun] = {}
        for job in self._spec["replicatedJobs"]:
            pods = [pod for pod in self._pods if pod.job["name"] == job["name"]]
            runs[job["name"]] = JobRun(
                job, pods, self._plan, self._console, self._notify, self._backoff
            )
        tasks = {
            job["name"]: asyncio.create_task(self._run_job(job, runs))
            for job in self._spec["replicatedJobs"]
        }
        try:
            targets = [tasks[name] for name in policies.success_targets(self._spec)]
            await all_done(targets, beside=tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _run_job(self, job: Json, runs: Mapping[str, JobRun]) -> None:
        """Runs a replicated job once its dependencies are met."""
        while not policies.may_start(
            job,
            ready={name for name, run in runs.items() if run.is_ready},
            succeeded={name for name, run in runs.items() if run.has_succeeded},
        ):
            await self._change.wait()
        await runs[job["name"]].run()

    def _notify(self) -> None:
        """Wakes every job that waits, and makes the next one wait for the next change."""
        self._change.set()
        self._change = asyncio.Event()


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group of groups."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
