"""A JobSet: its Jobs, what they wait for, and what their ends mean for all of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from cache_runtimes.local import policies
from cache_runtimes.local.kubelet import Backoff, Events, PodRun
from cache_runtimes.local.pods import Pod
from cache_runtimes.local.policies import ContainerExit, JobStatus

Json = dict[str, Any]


# Makes the volumes and the processes of a pod; the context ends with the pod.
PodStarter = Callable[[Pod, Events], AbstractContextManager[PodRun]]


@dataclass(frozen=True)
class Console:
    """Where everything is said.

    Attributes:
        event: what happens to the job.
        line: the pod, the container and a line of its log.
    """

    event: Callable[[str], None]
    line: Callable[[str, str, str], None]


class JobFailed(Exception):
    """A Job of a replicated job has failed.

    Attributes:
        job: the replicated job.
        reason: as the Job's condition has it, such as ``BackoffLimitExceeded``.
        pod: whose end it was.
        exit: of its container.
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
    """One indexed Job: as many pods as completions, each replaced when it fails."""

    def __init__(
        self,
        job: Json,
        pods: list[Pod],
        start: PodStarter,
        console: Console,
        changed: Callable[[], None],
        backoff: Backoff,
    ) -> None:
        self._name = job["name"]
        self._spec = job["template"]["spec"]
        self._pods = pods
        self._start = start
        self._console = console
        self._changed = changed
        self._backoff = backoff
        self._running: dict[int, PodRun] = {}
        self._succeeded: set[int] = set()
        self._failures = 0  # pods that failed
        self._restarts: Counter[int] = Counter()  # in place, of the pods that run

    @property
    def is_ready(self) -> bool:
        """Whether every pod is ready or has succeeded."""
        ready = {index for index, run in self._running.items() if run.is_ready}
        return len(ready | self._succeeded) >= len(self._pods)

    async def run(self) -> None:
        """Until every index has succeeded.

        Raises:
            JobFailed: by the failure policy of pods, or by too many failures.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for pod in self._pods:
                    group.create_task(self._run_index(pod))
        except BaseExceptionGroup as errors:
            raise _first(errors) from None

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

        with self._start(pod, Events(log, restarted, self._changed)) as run:
            self._running[pod.index] = run
            try:
                return await run.run()
            finally:
                del self._running[pod.index]
                del self._restarts[pod.index]
                self._changed()


class JobSetRun:
    """A whole JobSet, once through its failure policy."""

    def __init__(
        self,
        jobset: Json,
        pods: list[Pod],
        start: PodStarter,
        console: Console,
        backoff: Backoff,
    ) -> None:
        self._spec = jobset["spec"]
        self._pods = pods
        self._start = start
        self._console = console
        self._backoff = backoff
        self._replicas = {job["name"]: job.get("replicas", 1) for job in self._jobs}

    @property
    def _jobs(self) -> list[Json]:
        jobs: list[Json] = self._spec["replicatedJobs"]
        return jobs

    async def run(self) -> None:
        """Until the success policy holds; then what still runs is stopped.

        Raises:
            JobFailed: which the failure policy did not mend.
        """
        restarts = counted = 0
        while True:
            try:
                await self._run_once()
                return
            except JobFailed as failed:
                action = policies.after_job_failure(
                    self._spec.get("failurePolicy"), failed.job, failed.reason, counted
                )
                if action == "FailJobSet":
                    raise
                restarts += 1
                counted += action == "RestartJobSet"
                self._console.event(f"all is restarted, for the time {restarts}: {failed}")
                await asyncio.sleep(self._backoff.delay_s(restarts))

    async def _run_once(self) -> None:
        changed = asyncio.Event()
        runs: dict[tuple[str, int], JobRun] = {}
        tasks: dict[asyncio.Task[None], tuple[str, int]] = {}
        succeeded: set[tuple[str, int]] = set()
        try:
            while not policies.is_complete(self._spec, Counter(name for name, _ in succeeded)):
                self._start_jobs(runs, tasks, succeeded, changed.set)
                waiting = asyncio.create_task(changed.wait())
                try:
                    await asyncio.wait((*tasks, waiting), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waiting.cancel()
                changed.clear()
                for task in [task for task in tasks if task.done()]:
                    key = tasks.pop(task)
                    task.result()
                    succeeded.add(key)
                    self._console.event(f"{key[0]} succeeded")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _start_jobs(
        self,
        runs: dict[tuple[str, int], JobRun],
        tasks: dict[asyncio.Task[None], tuple[str, int]],
        succeeded: set[tuple[str, int]],
        changed: Callable[[], None],
    ) -> None:
        """Starts the Jobs whose dependencies have come to pass."""
        ready = {key for key, run in runs.items() if run.is_ready} - succeeded
        status = {
            name: JobStatus(
                ready=sum(of == name for of, _ in ready),
                succeeded=sum(of == name for of, _ in succeeded),
            )
            for name in self._replicas
        }
        for job in self._jobs:
            for replica in range(self._replicas[job["name"]]):
                key = (job["name"], replica)
                if key in runs or not policies.may_start(job, status, self._replicas):
                    continue
                pods = [pod for pod in self._pods if (pod.job["name"], pod.replica) == key]
                self._console.event(f"{job['name']} starts with {len(pods)} pods")
                runs[key] = JobRun(job, pods, self._start, self._console, changed, self._backoff)
                tasks[asyncio.create_task(runs[key].run())] = key


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group of groups."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
