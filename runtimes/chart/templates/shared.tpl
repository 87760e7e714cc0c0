{{- $root := . -}}
{{- if .Values.shared.enabled }}
{{- range $path, $_ := .Files.Glob "manifests/shared/*.yaml" }}
{{- $thing := $root.Files.Get $path | fromYaml }}
{{- if and (ne $thing.kind "Kustomization") (or $root.Values.auth.enabled (ne $thing.kind "ConfigMap")) }}
{{- if eq $thing.kind "StatefulSet" }}
{{- include "cache.adjustPod" (dict "template" $thing.spec.template "values" $root.Values "needsUser" false) }}
{{- $_ := set $thing.spec "replicas" (int $root.Values.shared.replicas) }}
{{- if $root.Values.shared.tls.secretName }}
{{- include "cache.tlsNode" (dict "template" $thing.spec.template "secret" $root.Values.shared.tls.secretName) }}
{{- end }}
{{- else if and (eq $thing.kind "ConfigMap") $root.Values.auth.sharedRules }}
{{- $_ := set $thing.data "auth.yaml" (toYaml (dict "rules" $root.Values.auth.sharedRules)) }}
{{- end }}
---
{{ toYaml $thing }}
{{- end }}
{{- end }}
{{- end }}
