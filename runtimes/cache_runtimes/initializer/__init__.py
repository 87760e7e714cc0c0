"""``python -m cache_runtimes.initializer``: makes a cache of the size that a TrainJob asks for.

It runs as the dataset initializer of the runtime ``torch-distributed-with-cache``, which keeps the
name and the contract of the ancestor's: `CLUSTER_SIZE` and the settings beside it come with the
TrainJob. A job has one pod of it, which does three things in turn:

    make     ServiceAccount, Services and StatefulSet, owned by the TrainJob           `making`
    wait     until every cache pod is ready; or fail with the reason of the pods        `waiting`
    stay     ready itself, by a file; and remove what it made when it is told to end    `program`

Parts: `settings` and `plan` and `verdict` are pure; `cluster` alone knows the Kubernetes client.

What it asks of the API server, all within the namespace of its job; a role needs no more:

    trainjobs          get           (and update of their finalizers, which is never called:
                                      OpenShift asks it of who makes objects that block deletion)
    serviceaccounts    get create delete
    services           get create delete
    statefulsets       get create delete list watch
    pods               get list watch    (get: of its own pod, where POD_NAME is set)
    events             list              (only while pods are missing that should be there)

Nothing of the environment of this pod is passed on to the cache pods, and no secret is read: they
get `spec.initializer.dataset` of the TrainJob as it stands there.
"""
