"""How fast a machine trains and judges many models, beside a plain loop over clients that does the same."""

from kinfolk.bench.advice import recommend, seconds_by_chunk
from kinfolk.bench.jobs import JOBS, Job
from kinfolk.bench.machine import peaks, seconds
from kinfolk.bench.timing import measure, precisions

__all__ = ["JOBS", "Job", "measure", "peaks", "precisions", "recommend", "seconds", "seconds_by_chunk"]
