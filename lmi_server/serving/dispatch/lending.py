"""Jobs that wait in a worker, ahead of their turn, for its own scheduler to choose among."""

from __future__ import annotations

from lmi_server.serving.dispatch.job_queue import JobQueue
from lmi_server.serving.dispatch.router import Router
from lmi_server.serving.roster import WorkerRoster
from lmi_server.supervisor.job import Job
from lmi_server.supervisor.worker_process import WorkerProcess


class Lending:
    """Lends jobs of `queue` to workers, and recalls them if another job or another worker's room makes it necessary."""

    def __init__(self, queue: JobQueue[Job], roster: WorkerRoster, router: Router) -> None:
        self._queue = queue
        self._roster = roster
        self._router = router

    def lend(self) -> None:
        """Let workers have waiting jobs ahead, each as many as its window has room for."""
        while self._queue.may_lend and self._queue.peek().may_go_ahead:
            requests = self._router.window_for(self._queue.peek().request)
            if requests is None:
                return
            requests.submit_ahead(self._queue.lend())

    def begin(self, job: Job, worker: WorkerProcess, now: float) -> None:
        """Record that a worker has a place for a job sent ahead."""
        worker.requests.begin(job, now)
        self._queue.remove(job)
        self._router.record(job.request, worker)

    def make_way(self, job: Job) -> None:
        """Recall the jobs that workers have ahead if `job` may have its turn before them."""
        if self._queue.overtakes_lent(job):
            for worker in self._roster.serving:
                worker.requests.recall_ahead()

    def balance(self) -> None:
        """Recall jobs from workers without room for as many places as others have free; nothing else waits."""
        places = self._router.free_places
        full = [job for job in self._queue.lent if job.holder is not None and not self._router.has_room(job.holder)]
        for job in full[-places:] if places else ():
            if job.holder is not None:
                job.holder.recall(job)

    def report_waiting(self) -> None:
        """Tell the workers that have jobs ahead how many others wait."""
        waiting = len(self._queue) - len(self._queue.lent)
        for worker in self._roster.ready:
            worker.requests.report_waiting(waiting)
