"""``cachectl diagnose``: says in words why a TrainJob does not train.

- `objects`: reads the objects of a TrainJob with the caller's rights.
- `findings`: those objects -> what is wrong and what to do. Pure.
"""

from cache_runtimes.diagnosis.findings import Diagnosis, Finding, diagnose
from cache_runtimes.diagnosis.objects import read_objects

__all__ = ["Diagnosis", "Finding", "diagnose", "read_objects"]
