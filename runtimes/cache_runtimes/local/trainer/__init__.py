"""What Kubeflow Trainer 2.3 and JobSet 0.12 do with a TrainJob, restated. Pure.

    admission   schema and CEL rules of the TrainJob; schema and webhook of the JobSet
    patches     spec.runtimePatches, merged into the runtime's template
    jobset      the JobSet, and the Jobs that JobSet makes of it
    torch, mpi, jax, xgboost, plainml, gangs    one module for each of Trainer's plugins
    info        what the plugins share

A plugin has the functions that its original has: ``problems`` (Validate), ``enforce``
(EnforceMLPolicy, EnforcePodGroupPolicy) and ``build`` (Build).
"""
