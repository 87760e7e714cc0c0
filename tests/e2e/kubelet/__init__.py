"""A kubelet and a scheduler for one machine: pods of a real API server run as processes.

It runs the pods of JobSets and StatefulSets by the pod runner of ``cachectl run-local``. It has no
images, no isolation and no network of its own: each pod has an address of the loopback network, and
the DNS names in commands and variables become such addresses.

- `objects`: a pod of the API server -> the pod of the runner. Pure.
- `names`: Services, JobSets and StatefulSets -> the addresses of DNS names. Pure.
- `status`: how a pod runs -> the status that the API server shows. Pure.
- `pod`: one pod from its start to its status at the end.
- `__main__`: the program, which watches the pods.
"""
