"""``python -m cache_runtimes.initializer``: creates a cache of the size that a TrainJob asks for.

It is the dataset initializer of the runtime ``torch-distributed-with-cache``, which keeps the name
and the variables of Kubeflow Trainer's own data cache: a TrainJob sets ``CLUSTER_SIZE`` and the
settings beside it. Each job has one pod of it, which does three things in turn:

    create   ServiceAccount, Services and StatefulSet, owned by the TrainJob           `objects`
    wait     until every cache pod is ready; fails with the reason of the pods         `watcher`
    stay     ready while the cache is ready; removes the objects when told to end      `program`

`settings`, `plan` and `cache_health` are pure; only `cluster` knows the Kubernetes client.

It needs these rights in the namespace of its job, and no others:

    trainjobs          get           (and update of their finalizers, which is never called:
                                      OpenShift requires it to create objects that block deletion)
    serviceaccounts    get create delete
    services           get create delete
    statefulsets       get create delete list watch
    pods               get list watch    (get: its own pod, where POD_NAME is set)
    events             list              (only while pods are missing)

Cache pods get `spec.initializer.dataset` of the TrainJob, and nothing from the environment of this
pod. It reads no Secret.
"""
