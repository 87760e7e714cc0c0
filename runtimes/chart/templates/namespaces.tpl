{{- $root := . -}}
{{- range $namespace := .Values.jobNetworkPolicyNamespaces }}
{{- range $path, $_ := $root.Files.Glob "manifests/job-network-policy/network-policy.yaml" }}
{{- $thing := $root.Files.Get $path | fromYaml }}
{{- $_ := set $thing.metadata "namespace" $namespace }}
---
{{ toYaml $thing }}
{{- end }}
{{- end }}
{{- range $namespace := .Values.initializerNamespaces }}
{{- range $path, $_ := $root.Files.Glob "manifests/torch-distributed-with-cache/namespace-access/*.yaml" }}
{{- $thing := $root.Files.Get $path | fromYaml }}
{{- if not (has $thing.kind (list "Component" "Kustomization")) }}
{{- $_ := set $thing.metadata "namespace" $namespace }}
{{- range $thing.subjects }}{{ $_ := set . "namespace" $namespace }}{{ end }}
---
{{ toYaml $thing }}
{{- end }}
{{- end }}
{{- end }}
