{{/*
Each template changes an object that was parsed from a manifest, and prints nothing. The manifests
are those of kustomize: `manifests/` has links to their folders.
*/}}

{{- define "cache.image" -}}
{{- $images := .values.images -}}
{{- $image := include "cache.imageByName" . -}}
{{- with $images.registry -}}
{{- $image = printf "%s/%s" (trimSuffix "/" .) (last (splitList "/" $image)) -}}
{{- end -}}
{{ $image }}
{{- end -}}

{{- define "cache.imageByName" -}}
{{- $images := .values.images -}}
{{- if hasPrefix "ghcr.io/trainer-data-cache/server:" .image -}}
{{ $images.server.repository }}:{{ $images.server.tag }}
{{- else if hasPrefix "ghcr.io/trainer-data-cache/server-full:" .image -}}
{{ $images.serverFull.repository }}:{{ $images.serverFull.tag }}
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
{{- if not (or $values.auth.enabled .keepsIdentity) -}}
  {{- include "cache.withoutIdentity" $spec -}}
{{- end -}}
{{- if and $values.openshift (not .needsUser) -}}
  {{- $context := $spec.securityContext -}}
  {{- $_ := unset $context "runAsUser" -}}
  {{- $_ := unset $context "runAsGroup" -}}
  {{- $_ := unset $context "fsGroup" -}}
{{- end -}}
{{- end -}}

{{/* The part of a memory limit for shards: all but the larger of 1 GiB and a quarter. */}}
{{- define "cache.shardSize" -}}
{{- $unit := regexFind "[MGT]i$" . -}}
{{- $kib := mul (trimSuffix $unit .) (get (dict "Mi" 1024 "Gi" 1048576 "Ti" 1073741824) $unit) -}}
{{- if lt $kib (mul 1088 1024) -}}
  {{- fail (printf "cache.memory: %s leaves no memory for rows, must be at least 1088Mi" .) -}}
{{- end -}}
{{- $shards := sub $kib (max 1048576 (div $kib 4)) -}}
{{- if eq 0 (mod $shards 1048576 | int) -}}
{{ div $shards 1048576 }}Gi
{{- else if eq 0 (mod $shards 1024 | int) -}}
{{ div $shards 1024 }}Mi
{{- else -}}
{{ $shards }}Ki
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
{{- if $cache.memory -}}
  {{- range $spec.volumes -}}
    {{- if eq .name "initializer" -}}
      {{- $_ := set .emptyDir "sizeLimit" (include "cache.shardSize" $cache.memory) -}}
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
{{- $_ := set $job "backoffLimit" 3 -}}
{{- end -}}

{{/* A pod without tokens: every caller may do everything. */}}
{{- define "cache.withoutIdentity" -}}
{{- $elects := contains "--leader-election=" (toJson .containers) -}}
{{- $names := list "cache-token" "auth" -}}
{{- if not $elects -}}{{- $names = append $names "api-server" -}}{{- end -}}
{{- range concat (default list .initContainers) .containers -}}
  {{- if and .env (contains "CACHE_TOKEN_FILE" (toJson .env)) -}}
    {{- $env := list -}}
    {{- range .env -}}{{- if ne .name "CACHE_TOKEN_FILE" -}}{{- $env = append $env . -}}{{- end -}}{{- end -}}
    {{- $_ := set . "env" $env -}}
  {{- end -}}
  {{- if .args -}}
    {{- $args := list -}}
    {{- $isNode := false -}}
    {{- range .args -}}
      {{- if or (hasPrefix "--auth-" .) (and (hasPrefix "--service-account-dir=" .) (not $elects)) -}}
        {{- $isNode = true -}}
      {{- else -}}
        {{- $args = append $args (replace " CACHE_TOKEN_FILE=$(CACHE_TOKEN_FILE)" "" .) -}}
      {{- end -}}
    {{- end -}}
    {{- if $isNode -}}{{- $args = append $args "--insecure" -}}{{- end -}}
    {{- $_ := set . "args" $args -}}
  {{- end -}}
  {{- if .volumeMounts -}}
    {{- $mounts := list -}}
    {{- range .volumeMounts -}}{{- if not (has .name $names) -}}{{- $mounts = append $mounts . -}}{{- end -}}{{- end -}}
    {{- $_ := set . "volumeMounts" $mounts -}}
  {{- end -}}
{{- end -}}
{{- $volumes := list -}}
{{- range .volumes -}}{{- if not (has .name $names) -}}{{- $volumes = append $volumes . -}}{{- end -}}{{- end -}}
{{- $_ := set . "volumes" $volumes -}}
{{- end -}}

{{/* As components/tls: a node of the shared cache. */}}
{{- define "cache.tlsNode" -}}
{{- $spec := .template.spec -}}
{{- $node := index $spec.containers 0 -}}
{{- $dir := "/etc/data-cache-tls" -}}
{{- $args := list (printf "--tls-cert=%s/tls.crt" $dir) (printf "--tls-key=%s/tls.key" $dir) (printf "--tls-ca=%s/ca.crt" $dir) -}}
{{- $_ := set $node "args" (concat $node.args $args) -}}
{{- $_ := set $node "env" (append $node.env (dict "name" "CACHE_TLS_CA" "value" (printf "%s/ca.crt" $dir))) -}}
{{- $mount := dict "name" "tls" "mountPath" $dir "readOnly" true -}}
{{- $_ := set $node "volumeMounts" (append $node.volumeMounts $mount) -}}
{{- $_ := set $spec "volumes" (append $spec.volumes (dict "name" "tls" "secret" (dict "secretName" .secret))) -}}
{{- range $name, $path := dict "startupProbe" "/live" "livenessProbe" "/live" "readinessProbe" "/ready" -}}
  {{- $probe := get $node $name -}}
  {{- $_ := unset $probe "grpc" -}}
  {{- $_ := set $probe "httpGet" (dict "path" $path "port" "http" "scheme" "HTTPS") -}}
{{- end -}}
{{- end -}}

{{/* As components/tls: a client of the shared cache. */}}
{{- define "cache.tlsClient" -}}
{{- $spec := .spec -}}
{{- $client := index $spec.containers 0 -}}
{{- $plain := "grpc://data-cache." -}}
{{- range $client.env -}}
  {{- if eq .name "CACHE_ENDPOINT" -}}{{- $_ := set . "value" (replace $plain "grpc+tls://data-cache." .value) -}}{{- end -}}
{{- end -}}
{{- if $client.args -}}
  {{- $args := list -}}
  {{- range $client.args -}}{{- $args = append $args (replace $plain "grpc+tls://data-cache." .) -}}{{- end -}}
  {{- $_ := set $client "args" $args -}}
{{- end -}}
{{- $dir := "/etc/data-cache-ca" -}}
{{- $_ := set $client "env" (append $client.env (dict "name" "CACHE_TLS_CA" "value" (printf "%s/ca.crt" $dir))) -}}
{{- $_ := set $client "volumeMounts" (append $client.volumeMounts (dict "name" "tls-ca" "mountPath" $dir "readOnly" true)) -}}
{{- $_ := set $spec "volumes" (append $spec.volumes (dict "name" "tls-ca" "configMap" (dict "name" .configMap))) -}}
{{- end -}}

{{/* As components/tls: the endpoint of a PodMonitor for every cache. */}}
{{- define "cache.tlsScrape" -}}
{{- $rule := dict "regex" "data-cache" "targetLabel" "__scheme__" "replacement" "https" -}}
{{- $_ := set $rule "sourceLabels" (list "__meta_kubernetes_pod_label_app_kubernetes_io_name") -}}
{{- $_ := set . "relabelings" (list $rule) -}}
{{- $_ := set . "tlsConfig" (dict "insecureSkipVerify" true) -}}
{{- end -}}

{{/* As components/tls: the endpoint of a PodMonitor for the shared cache, with a token. */}}
{{- define "cache.tlsScrapeOfShared" -}}
{{- $ca := dict "secret" (dict "name" .secret "key" "ca.crt") -}}
{{- $_ := set .endpoint "scheme" "https" -}}
{{- $_ := set .endpoint "tlsConfig" (dict "ca" $ca "serverName" "data-cache.data-cache-system") -}}
{{- end -}}
