{{/*
Each template changes an object that was parsed from a manifest, and prints nothing. The manifests
are those of kustomize: `manifests/` has links to their folders.
*/}}

{{- define "cache.image" -}}
{{- $images := .values.images -}}
{{- if hasPrefix "ghcr.io/trainer-data-cache/server:" .image -}}
{{ $images.server.repository }}:{{ $images.server.tag }}
{{- else if hasPrefix "ghcr.io/trainer-data-cache/trainer:" .image -}}
{{ $images.trainer.repository }}:{{ $images.trainer.tag }}{{ if .values.gpu }}-cuda{{ end }}
{{- else -}}
{{ .image }}
{{- end -}}
{{- end -}}

{{/* A pod template: images, pull secrets, users. */}}
{{- define "cache.adjustPod" -}}
{{- $values := .values -}}
{{- $spec := .template.spec -}}
{{- range concat (default list $spec.initContainers) $spec.containers -}}
  {{- $_ := set . "image" (include "cache.image" (dict "image" .image "values" $values)) -}}
  {{- range .env -}}
    {{- if eq .name "CACHE_IMAGE" -}}
      {{- $_ := set . "value" (include "cache.image" (dict "image" .value "values" $values)) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- if $values.images.pullSecrets -}}
  {{- $secrets := list -}}
  {{- range $values.images.pullSecrets -}}{{- $secrets = append $secrets (dict "name" .) -}}{{- end -}}
  {{- $_ := set $spec "imagePullSecrets" $secrets -}}
{{- end -}}
{{- if and $values.openshift (not .needsUser) -}}
  {{- $context := $spec.securityContext -}}
  {{- $_ := unset $context "runAsUser" -}}
  {{- $_ := unset $context "runAsGroup" -}}
  {{- $_ := unset $context "fsGroup" -}}
{{- end -}}
{{- end -}}

{{/* The pods that hold the cache: their number, memory and machines. */}}
{{- define "cache.adjustCache" -}}
{{- $cache := .values.cache -}}
{{- $job := .job.template.spec -}}
{{- $spec := $job.template.spec -}}
{{- $_ := set $job "parallelism" (int $cache.nodes) -}}
{{- $_ := set $job "completions" (int $cache.nodes) -}}
{{- range $spec.containers -}}
  {{- range .env -}}
    {{- if eq .name "CACHE_WORLD_SIZE" -}}{{- $_ := set . "value" (toString $cache.nodes) -}}{{- end -}}
  {{- end -}}
  {{- if $cache.memory -}}
    {{- $_ := set .resources.requests "memory" $cache.memory -}}
    {{- $_ := set .resources.limits "memory" $cache.memory -}}
  {{- end -}}
{{- end -}}
{{- if $cache.shardBytes -}}
  {{- range $spec.volumes -}}
    {{- if eq .name "initializer" -}}
      {{- $_ := set .emptyDir "sizeLimit" $cache.shardBytes -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- if .values.gpu -}}
  {{- $term := dict "matchExpressions" list -}}
  {{- range list "nvidia.com/gpu.present" "cloud.google.com/gke-accelerator" -}}
    {{- $rule := dict "key" . "operator" "DoesNotExist" -}}
    {{- $_ := set $term "matchExpressions" (append $term.matchExpressions $rule) -}}
  {{- end -}}
  {{- $required := dict "nodeSelectorTerms" (list $term) -}}
  {{- $node := dict "requiredDuringSchedulingIgnoredDuringExecution" $required -}}
  {{- $_ := set $spec.affinity "nodeAffinity" $node -}}
{{- end -}}
{{- if $cache.nodeSelector -}}{{- $_ := set $spec "nodeSelector" $cache.nodeSelector -}}{{- end -}}
{{- if $cache.tolerations -}}{{- $_ := set $spec "tolerations" $cache.tolerations -}}{{- end -}}
{{- end -}}

{{/* As components/start-together. */}}
{{- define "cache.startTogether" -}}
{{- $jobs := .jobs -}}
{{- $cache := index $jobs 0 -}}
{{- $trainer := index $jobs 1 -}}
{{- $_ := unset $trainer "dependsOn" -}}
{{- $node := index $trainer.template.spec.template.spec.containers 0 -}}
{{- $deadline := dict "name" "CACHE_READY_DEADLINE_S" "value" "7200" -}}
{{- $_ := set $node "env" (append $node.env $deadline) -}}
{{- $probe := (index $cache.template.spec.template.spec.containers 0).readinessProbe -}}
{{- $_ := set $probe.grpc "service" "live" -}}
{{- end -}}

{{/* As components/before-kubernetes-1.35. */}}
{{- define "cache.withoutRestartRules" -}}
{{- $job := (index .jobset.replicatedJobs 0).template.spec -}}
{{- $_ := set $job.template.spec "restartPolicy" "OnFailure" -}}
{{- $cache := index $job.template.spec.containers 0 -}}
{{- $_ := unset $cache "restartPolicy" -}}
{{- $_ := unset $cache "restartPolicyRules" -}}
{{- $_ := unset $job "podFailurePolicy" -}}
{{- $rule := index .jobset.failurePolicy.rules 0 -}}
{{- $_ := set $rule "onJobFailureReasons" (list "BackoffLimitExceeded") -}}
{{- end -}}
