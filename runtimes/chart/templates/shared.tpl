{{- $root := . -}}
{{- if .Values.shared.enabled }}
{{- range $path, $_ := .Files.Glob "manifests/shared/*.yaml" }}
{{- $thing := $root.Files.Get $path | fromYaml }}
{{- if ne $thing.kind "Kustomization" }}
{{- if eq $thing.kind "StatefulSet" }}
{{- include "cache.adjustPod" (dict "template" $thing.spec.template "values" $root.Values "needsUser" false) }}
{{- $_ := set $thing.spec "replicas" (int $root.Values.shared.replicas) }}
{{- end }}
---
{{ toYaml $thing }}
{{- end }}
{{- end }}
{{- end }}
