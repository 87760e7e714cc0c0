{{- $root := . -}}
{{- $values := .Values.monitoring -}}
{{- if $values.enabled }}
{{- range list "pod-monitor" "alerts" }}
{{- range $path, $_ := $root.Files.Glob (printf "manifests/monitoring/%s.yaml" .) }}
{{- $thing := $root.Files.Get $path | fromYaml }}
{{- if $values.namespace }}{{ $_ := set $thing.metadata "namespace" $values.namespace }}{{ end }}
{{- if $values.labels }}{{ $_ := set $thing.metadata "labels" $values.labels }}{{ end }}
{{- if and (eq $thing.kind "PodMonitor") $root.Values.shared.tls.secretName }}
{{- include "cache.tlsScrape" (index $thing.spec.podMetricsEndpoints 0) }}
{{- end }}
---
{{ toYaml $thing }}
{{- end }}
{{- end }}
{{- range $namespace := $values.datasetNamespaces }}
{{- range $path, $_ := $root.Files.Glob "manifests/monitoring/datasets/pod-monitor.yaml" }}
{{- $thing := $root.Files.Get $path | fromYaml }}
{{- $_ := set $thing.metadata "namespace" $namespace }}
{{- if $values.labels }}{{ $_ := set $thing.metadata "labels" $values.labels }}{{ end }}
{{- with $root.Values.shared.tls.secretName }}
{{- if eq $namespace "data-cache-system" }}
{{- include "cache.tlsScrapeOfShared" (dict "endpoint" (index $thing.spec.podMetricsEndpoints 0) "secret" .) }}
{{- end }}
{{- end }}
---
{{ toYaml $thing }}
{{- end }}
{{- end }}
{{- range $path, $_ := $root.Files.Glob "manifests/monitoring/dashboard.json" }}
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: data-cache-dashboard
  {{- with $values.namespace }}
  namespace: {{ . }}
  {{- end }}
  labels:
    {{- merge $values.dashboardLabels $values.labels | toYaml | nindent 4 }}
data:
  dashboard.json: {{ $root.Files.Get $path | toJson }}
{{- end }}
{{- end }}
