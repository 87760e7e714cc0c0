{{- $root := . -}}
{{- range $folder := .Values.runtimes }}
{{- range $path, $_ := $root.Files.Glob (printf "manifests/%s/*.yaml" $folder) }}
{{- $thing := $root.Files.Get $path | fromYaml }}
{{- if ne $thing.kind "Kustomization" }}
{{- if hasSuffix "TrainingRuntime" $thing.kind }}
{{- $jobs := $thing.spec.template.spec.replicatedJobs }}
{{- $inJob := eq (get $thing.metadata.labels "app.kubernetes.io/component") "cache-in-job" }}
{{- range $jobs }}
{{- $needsUser := has $folder (list "deepspeed-data-cache" "mlx-data-cache") }}
{{- include "cache.adjustPod" (dict "template" .template.spec.template "values" $root.Values "needsUser" $needsUser "keepsIdentity" (eq $folder "torch-distributed-with-cache")) }}
{{- if and $root.Values.shared.tls.secretName (eq $folder "torch-distributed-shared-data-cache") }}
{{- include "cache.tlsClient" (dict "spec" .template.spec.template.spec "configMap" $root.Values.shared.tls.caConfigMap) }}
{{- end }}
{{- if and $inJob (eq .name "dataset-initializer") }}
{{- include "cache.adjustCache" (dict "job" . "values" $root.Values) }}
{{- end }}
{{- end }}
{{- if and $inJob $root.Values.beforeKubernetes135 }}
{{- include "cache.withoutRestartRules" (dict "jobset" $thing.spec.template.spec) }}
{{- end }}
{{- if and $inJob $root.Values.startTogether }}
{{- include "cache.startTogether" (dict "jobs" $jobs) }}
{{- end }}
{{- end }}
---
{{ toYaml $thing }}
{{- end }}
{{- end }}
{{- end }}
