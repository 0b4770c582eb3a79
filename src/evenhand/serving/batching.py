"""Answers requests in batches: whatever has queued up while the one worker was busy.

No request waits for others to come: a lone one is answered at once, and under load a batch is as
large as the load makes it. One thread does all the work of torch, so that batches do not fight for
the cores; it holds no lock of Python while it multiplies, and meanwhile the next requests are read.
"""

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from evenhand.serving.served_run import ServedRun

MOST_AT_ONCE = 64  # queries in a batch: more are hardly quicker, and all wait for the last


class Work(NamedTuple):
    """What is asked of a run; requests that are alike in it may share a batch."""

    run: ServedRun
    num_results: int = 0  # 0: the vectors of the queries
    explains: bool = False

    def answer(self, texts: list[str]) -> list[Any]:
        if not self.num_results:
            return self.run.encode(texts)
        return self.run.search(texts, self.num_results, explains=self.explains)


class Job(NamedTuple):
    work: Work
    texts: list[str]
    answers: "asyncio.Future[list[Any]]"


class QueueFullError(Exception):
    """There is no room for a request; the client may come again in a second."""


class Batcher:
    def __init__(self, *, most_waiting: int) -> None:
        """
        Args:
            most_waiting: queries in the queue; beyond that requests are refused.
        """
        self.most_waiting = most_waiting
        self.num_waiting = 0
        self.last_size = 0  # queries of the last batch
        self._jobs: deque[Job] = deque()
        self._thread = ThreadPoolExecutor(1, "answers")
        self._task: asyncio.Task[None] | None = None

    async def answers(self, work: Work, texts: list[str]) -> list[Any]:
        """One answer for each text.

        Raises:
            QueueFullError: too many queries wait already.
        """
        if self.num_waiting + len(texts) > self.most_waiting:
            raise QueueFullError
        job = Job(work, texts, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        self.num_waiting += len(texts)
        if self._task is None:
            self._task = asyncio.create_task(self._answer_all())
        return await job.answers

    async def _answer_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._jobs:
            jobs = self._next_batch()
            if not jobs:
                continue
            texts = [text for job in jobs for text in job.texts]
            self.last_size = len(texts)
            try:
                found = await loop.run_in_executor(self._thread, jobs[0].work.answer, texts)
            except Exception as error:
                for job in jobs:
                    if not job.answers.done():
                        job.answers.set_exception(error)
                continue
            start = 0
            for job in jobs:
                if not job.answers.done():  # else nobody waits for it any more
                    job.answers.set_result(found[start : start + len(job.texts)])
                start += len(job.texts)
        self._task = None

    def _next_batch(self) -> list[Job]:
        """Takes the oldest job out of the queue, and those that are like it, while they fit."""
        batch: list[Job] = []
        size, work, kept = 0, self._jobs[0].work, deque[Job]()
        for job in self._jobs:
            if job.answers.done():
                self.num_waiting -= len(job.texts)  # its request has timed out
            elif job.work == work and (not batch or size + len(job.texts) <= MOST_AT_ONCE):
                batch.append(job)
                size += len(job.texts)
                self.num_waiting -= len(job.texts)
            else:
                kept.append(job)
        self._jobs = kept
        return batch
