"""A JobSet: its Jobs, their dependencies, and what the end of each means for all of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cache_runtimes.local import policies
from cache_runtimes.local.kubelet import PodRun, all_done, delay_s
from cache_runtimes.local.pods import Pod, Process
from cache_runtimes.local.policies import ContainerExit

Json = dict[str, Any]

# Makes the volumes of a pod, which end with the context, and the process of each container.
PlanPod = Callable[[Pod], AbstractContextManager[Mapping[str, Process]]]


@dataclass(frozen=True)
class Console:
    """Where a run reports: events of the job; pod, container and text of each line of a log."""

    event: Callable[[str], None]
    line: Callable[[str, str, str], None]


class JobFailed(Exception):
    """A container failed its Job, for a reason such as ``BackoffLimitExceeded``."""

    def __init__(self, job: str, reason: str, pod: str, exit: ContainerExit) -> None:
        super().__init__(
            f"{job}: {reason}: {pod}/{exit.container} ended with exit code {exit.code}: "
            f"{exit.message}"
        )
        self.job, self.reason, self.exit = job, reason, exit


@dataclass
class JobRun:
    """One indexed Job: a pod for each index, replaced when it fails."""

    job: Json
    pods: list[Pod]
    plan: PlanPod
    console: Console
    changed: Callable[[], None]
    backoff_s: float
    _running: dict[int, PodRun] = field(default_factory=dict)
    _succeeded: set[int] = field(default_factory=set)
    _failures: int = 0  # of pods
    _restarts: Counter[int] = field(default_factory=Counter)  # in place, of the running pods

    @property
    def is_ready(self) -> bool:
        """Whether every pod is ready or has succeeded."""
        ready = {index for index, run in self._running.items() if run.is_ready}
        return len(ready | self._succeeded) >= len(self.pods)

    @property
    def has_succeeded(self) -> bool:
        """Whether every pod has succeeded."""
        return len(self._succeeded) >= len(self.pods)

    async def run(self) -> None:
        """Runs until every index has succeeded.

        Raises:
            JobFailed: by the failure policy of pods, or by too many failures.
        """
        self.console.event(f"{self.job['name']} starts with {len(self.pods)} pods")
        try:
            async with asyncio.TaskGroup() as group:
                for pod in self.pods:
                    group.create_task(self._run_index(pod))
        except BaseExceptionGroup as errors:
            error: BaseException = errors
            while isinstance(error, BaseExceptionGroup):  # a pod has groups too
                error = error.exceptions[0]
            raise error from None
        self.console.event(f"{self.job['name']} succeeded")

    async def _run_index(self, pod: Pod) -> None:
        failures = 0
        while True:
            exits = await self._run_pod(pod)
            failed = next((ended for ended in exits if ended.code != 0), None)
            if failed is None:
                self._succeeded.add(pod.index)
                self.changed()
                return
            action = policies.after_pod_failure(self.job["template"]["spec"], exits)
            if action == "FailJob":
                raise JobFailed(self.job["name"], policies.POD_FAILURE_POLICY, pod.name, failed)
            failures += 1
            if action == "Count":
                self._failures += 1
                self._check_limit(pod, failed)
            self.console.event(
                f"{pod.name} failed: {failed.container} ended with exit code {failed.code}; "
                "another pod takes its place"
            )
            await asyncio.sleep(delay_s(failures, self.backoff_s))

    def _check_limit(self, pod: Pod, failed: ContainerExit) -> None:
        limit = self.job["template"]["spec"].get("backoffLimit", policies.DEFAULT_BACKOFF_LIMIT)
        restarts = self._restarts.total()
        if policies.exceeds_backoff_limit(pod.spec, limit, self._failures, restarts):
            raise JobFailed(self.job["name"], policies.BACKOFF_LIMIT_EXCEEDED, pod.name, failed)

    async def _run_pod(self, pod: Pod) -> list[ContainerExit]:
        def restarted(ended: ContainerExit) -> None:
            self._restarts[pod.index] += 1
            self._check_limit(pod, ended)
            self.console.event(
                f"{pod.name}/{ended.container} ended with exit code {ended.code}; it is restarted "
                "in place"
            )

        log = partial(self.console.line, pod.name)
        with self.plan(pod) as processes:
            run = PodRun(pod, processes, log, restarted, self.changed, self.backoff_s)
            self._running[pod.index] = run
            try:
                return await run.run()
            finally:
                del self._running[pod.index]
                del self._restarts[pod.index]
                self.changed()


@dataclass
class JobSetRun:
    """A whole JobSet, with the restarts of its failure policy."""

    spec: Json
    pods: list[Pod]
    plan: PlanPod
    console: Console
    backoff_s: float
    _change: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Runs until the success policy holds; then stops what still runs.

        Raises:
            JobFailed: the failure policy does not restart after it.
        """
        restarts = 0
        while True:
            try:
                return await self._run_once()
            except JobFailed as failed:
                policy = self.spec.get("failurePolicy")
                if not policies.restarts_jobset(policy, failed.job, failed.reason, restarts):
                    raise
                restarts += 1
                self.console.event(f"restart {restarts} of all jobs: {failed}")
                await asyncio.sleep(delay_s(restarts, self.backoff_s))

    async def _run_once(self) -> None:
        runs: dict[str, JobRun] = {}
        for job in self.spec["replicatedJobs"]:
            pods = [pod for pod in self.pods if pod.job["name"] == job["name"]]
            runs[job["name"]] = JobRun(
                job, pods, self.plan, self.console, self._notify, self.backoff_s
            )
        tasks = {name: asyncio.create_task(self._run_job(name, runs)) for name in runs}
        try:
            targets = [tasks[name] for name in policies.success_targets(self.spec)]
            await all_done(targets, beside=tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _run_job(self, name: str, runs: Mapping[str, JobRun]) -> None:
        """Runs a replicated job once its dependencies are met."""
        while not policies.may_start(
            runs[name].job,
            ready={other for other, run in runs.items() if run.is_ready},
            succeeded={other for other, run in runs.items() if run.has_succeeded},
        ):
            await self._change.wait()
        await runs[name].run()

    def _notify(self) -> None:
        """Wakes the jobs that wait; they wait again for the next change."""
        self._change.set()
        self._change = asyncio.Event()
