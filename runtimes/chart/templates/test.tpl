{{- /* helm test: a pod with the identity of a client asks the shared cache how it is. */ -}}
{{- if .Values.shared.enabled }}
{{- $tls := .Values.shared.tls.secretName }}
{{- $path := "manifests/torch-distributed-shared-data-cache/runtime.yaml" }}
{{- $runtime := .Files.Get $path | fromYaml }}
{{- $pod := (index $runtime.spec.template.spec.replicatedJobs 0).template.spec.template }}
{{- include "cache.adjustPod" (dict "template" $pod "values" .Values "needsUser" false) }}
{{- $client := index $pod.spec.containers 0 }}
{{- $scheme := ternary "grpc+tls" "grpc" (ne $tls "") }}
{{- $endpoint := printf "--endpoint=%s://data-cache.data-cache-system:50051" $scheme }}
{{- $_ := set $client "args" (list "doctor" $endpoint) }}
{{- if $tls }}
{{- $dir := "/etc/data-cache-ca" }}
{{- $_ := set $client "env" (append $client.env (dict "name" "CACHE_TLS_CA" "value" (printf "%s/ca.crt" $dir))) }}
{{- $_ := set $client "volumeMounts" (append $client.volumeMounts (dict "name" "tls-ca" "mountPath" $dir "readOnly" true)) }}
{{- $ca := dict "secretName" $tls "items" (list (dict "key" "ca.crt" "path" "ca.crt")) }}
{{- $_ := set $pod.spec "volumes" (append $pod.spec.volumes (dict "name" "tls-ca" "secret" $ca)) }}
{{- end }}
apiVersion: v1
kind: Pod
metadata:
  name: data-cache-test
  namespace: data-cache-system
  labels:
    app.kubernetes.io/name: data-cache-test
    {{- $pod.metadata.labels | toYaml | nindent 4 }}
  annotations:
    helm.sh/hook: test
    helm.sh/hook-delete-policy: before-hook-creation
    {{- $pod.metadata.annotations | toYaml | nindent 4 }}
spec:
  {{- $pod.spec | toYaml | nindent 2 }}
{{- end }}
