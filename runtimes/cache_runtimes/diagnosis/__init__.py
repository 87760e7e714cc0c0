"""``cachectl diagnose``: says in words why a TrainJob does not train.

- `objects`: reads the objects of a TrainJob with the caller's rights.
- `owned`: which of them are of this TrainJob, by uid. Pure.
- `causes`: what each of them says. Pure.
- `findings`: those objects -> what is wrong. Pure.
- `remedies`: what to do about it. Pure.
"""

from cache_runtimes.diagnosis.findings import Diagnosis, Finding, diagnose
from cache_runtimes.diagnosis.objects import read_objects
from cache_runtimes.diagnosis.owned import Objects

__all__ = ["Diagnosis", "Finding", "Objects", "diagnose", "read_objects"]
